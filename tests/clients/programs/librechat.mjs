// LibreChat's agents with their model class of each dialect.
import { HumanMessage } from "@langchain/core/messages";
import { tool } from "@langchain/core/tools";
import { Providers, Run } from "@librechat/agents";
import { z } from "zod";
import { DIALECT, KEY, STREAM, SYSTEM, TASK, URL, look, run } from "./common.mjs";

const openai = (useResponsesApi) => ({
  provider: Providers.OPENAI,
  model: "m",
  apiKey: KEY,
  configuration: { baseURL: `${URL}/v1` },
  useResponsesApi,
});
const models = {
  chat: () => openai(false),
  responses: () => openai(true),
  messages: () => ({
    provider: Providers.ANTHROPIC,
    model: "m",
    apiKey: KEY,
    maxTokens: 1000,
    clientOptions: { baseURL: URL },
  }),
};

await run(async () => {
  const looker = tool(({ at }) => look(at), {
    name: "look",
    description: "Look at something.",
    schema: z.object({ at: z.string() }),
  });
  const agent = await Run.create({
    runId: "looking",
    graphConfig: {
      type: "standard",
      instructions: SYSTEM,
      llmConfig: { ...models[DIALECT](), streaming: STREAM, disableStreaming: !STREAM },
      tools: [looker],
    },
    returnContent: true,
    skipCleanup: true,
  });
  const config = { runId: "looking", configurable: { thread_id: "t" }, version: "v2" };
  const content = await agent.processStream({ messages: [new HumanMessage(TASK)] }, config);
  return content.filter((part) => part?.type === "text").at(-1).text;
});
