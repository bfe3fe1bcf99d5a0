// The Vercel AI SDK's model of the dialect.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { DIALECT, KEY, URL } from "./common.mjs";

const options = { baseURL: `${URL}/v1`, apiKey: KEY };
const providers = {
  chat: () => createOpenAICompatible({ name: "toolroll", ...options }),
  responses: () => createOpenAI(options),
  messages: () => createAnthropic(options),
};

export const model = providers[DIALECT]()("m");
