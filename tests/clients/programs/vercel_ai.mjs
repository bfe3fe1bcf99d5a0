// The Vercel AI SDK's tool loop with its provider of each dialect.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";
import { DIALECT, KEY, STREAM, SYSTEM, TASK, URL, look, run } from "./common.mjs";

const baseURL = `${URL}/v1`;
const models = {
  chat: () => createOpenAICompatible({ name: "toolroll", baseURL, apiKey: KEY })("m"),
  responses: () => createOpenAI({ baseURL, apiKey: KEY })("m"),
  messages: () => createAnthropic({ baseURL, apiKey: KEY })("m"),
};

await run(async () => {
  const options = {
    model: models[DIALECT](),
    system: SYSTEM,
    prompt: TASK,
    tools: {
      look: tool({
        description: "Look at something.",
        inputSchema: z.object({ at: z.string() }),
        execute: async ({ at }) => look(at),
      }),
    },
    stopWhen: stepCountIs(9),
  };
  if (!STREAM) return (await generateText(options)).text;
  let failure;
  const result = streamText({ ...options, onError: ({ error }) => (failure = error) });
  await result.consumeStream();
  if (failure) throw failure;
  return await result.text;
});
