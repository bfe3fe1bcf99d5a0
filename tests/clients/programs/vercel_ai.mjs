// The Vercel AI SDK's tool loop with its provider of each dialect.
import { generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";
import { STREAM, SYSTEM, TASK, look, run } from "./common.mjs";
import { model } from "./vercel_model.mjs";

await run(async () => {
  const options = {
    model,
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
