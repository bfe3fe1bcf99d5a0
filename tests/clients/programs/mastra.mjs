// Mastra's agent, with the Vercel AI SDK's provider of each dialect.
import { Agent } from "@mastra/core/agent";
import { createTool } from "@mastra/core/tools";
import { z } from "zod";
import { STREAM, SYSTEM, TASK, look, run } from "./common.mjs";
import { model } from "./vercel_model.mjs";

await run(async () => {
  const agent = new Agent({
    id: "looker",
    name: "looker",
    instructions: SYSTEM,
    model,
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
