// opencode without a terminal.
import { writeFileSync } from "node:fs";
import { DIALECT, KEY, TASK, URL, command, run } from "./common.mjs";

const packages = {
  chat: "@ai-sdk/openai-compatible",
  responses: "@ai-sdk/openai",
  messages: "@ai-sdk/anthropic",
};

await run(() => {
  const options = { baseURL: `${URL}/v1`, apiKey: KEY };
  const provider = { npm: packages[DIALECT], options, models: { m: {} } };
  writeFileSync("opencode.json", JSON.stringify({ provider: { toolroll: provider } }));
  const variables = { OPENCODE_DISABLE_MODELS_FETCH: "1", OPENCODE_DISABLE_AUTOUPDATE: "1" };
  return command("opencode", ["run", "-m", "toolroll/m", TASK], variables);
});
