// Qwen Code without a terminal.
import { DIALECT, KEY, TASK, URL, command, run } from "./common.mjs";

const variables = {
  chat: { OPENAI_API_KEY: KEY, OPENAI_BASE_URL: `${URL}/v1`, OPENAI_MODEL: "m" },
  responses: { OPENAI_API_KEY: KEY, OPENAI_BASE_URL: `${URL}/v1`, OPENAI_MODEL: "m" },
  messages: { ANTHROPIC_API_KEY: KEY, ANTHROPIC_BASE_URL: URL, ANTHROPIC_MODEL: "m" },
};
const types = { chat: "openai", responses: "openai-responses", messages: "anthropic" };

await run(() =>
  command("qwen", ["--auth-type", types[DIALECT], "--yolo", "-m", "m", TASK], variables[DIALECT]),
);
