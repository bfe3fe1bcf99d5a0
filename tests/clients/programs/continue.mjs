// Continue's command line in print mode.
import { writeFileSync } from "node:fs";
import { DIALECT, KEY, TASK, URL, command, run } from "./common.mjs";

const providers = {
  chat: { provider: "openai", apiBase: `${URL}/v1`, useResponsesApi: false },
  responses: { provider: "openai", apiBase: `${URL}/v1`, useResponsesApi: true },
  messages: { provider: "anthropic", apiBase: `${URL}/v1/` },
};

await run(() => {
  const model = { name: "m", model: "m", apiKey: KEY, roles: ["chat"], ...providers[DIALECT] };
  // JSON is YAML too
  writeFileSync("config.yaml", JSON.stringify({ name: "c", version: "1", schema: "v1", models: [model] }));
  return command("cn", ["-p", "--auto", "--config", "config.yaml", TASK]);
});
