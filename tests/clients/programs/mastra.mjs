// Mastra's agent, with the Vercel AI SDK's provider of each dialect.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { Agent } from "@mastra/core/agent";
import { createTool } from "@mastra/core/tools";
import { z } from "zod";
import { DIALECT, KEY, STREAM, SYSTEM, TASK, URL, look, run } from "./common.mjs";

const baseURL = `${URL}/v1`;
const models = {
  chat: () => createOpenAICompatible({ name: "toolroll", baseURL, apiKey: KEY })("m"),
  responses: () => createOpenAI({ baseURL, apiKey: KEY })("m"),
  messages: () => createAnthropic({ baseURL, apiKey: KEY })("m"),
};

await run(async () => {
  const agent = new Agent({
    id: "looker",
    name: "looker",
    instructions: SYSTEM,
    model: models[DIALECT](),
    tools: {
      look: createTool({
        id: "look",
        description: "Look at something.",
        inputSchema: z.object({ at: z.string() }),
        execute: async ({ at }) => look(at),
      }),
    },
  });
  if (!STREAM) return (await agent.generate(TASK)).text;
  return await (await agent.stream(TASK)).text;
});
