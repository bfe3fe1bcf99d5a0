// OpenAI's agents SDK for JavaScript with its model class of each dialect.
import {
  Agent,
  OpenAIProvider,
  Runner,
  setTracingDisabled,
  tool,
} from "@openai/agents";
import { z } from "zod";
import { DIALECT, KEY, STREAM, SYSTEM, TASK, URL, look, run } from "./common.mjs";

await run(async () => {
  setTracingDisabled(true);
  const agent = new Agent({
    name: "looker",
    instructions: SYSTEM,
    model: "m",
    tools: [
      tool({
        name: "look",
        description: "Look at something.",
        parameters: z.object({ at: z.string() }),
        execute: async ({ at }) => look(at),
      }),
    ],
  });
  const runner = new Runner({
    modelProvider: new OpenAIProvider({
      apiKey: KEY,
      baseURL: `${URL}/v1`,
      useResponses: DIALECT === "responses",
    }),
  });
  const result = await runner.run(agent, TASK, { stream: STREAM });
  if (STREAM) await result.completed;
  return result.finalOutput;
});
