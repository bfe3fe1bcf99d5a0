// OpenClaw without its gateway.
import { writeFileSync } from "node:fs";
import { DIALECT, KEY, TASK, URL, command, run } from "./common.mjs";

const apis = {
  chat: { api: "openai-completions", baseUrl: `${URL}/v1` },
  responses: { api: "openai-responses", baseUrl: `${URL}/v1` },
  messages: { api: "anthropic-messages", baseUrl: URL },
};

await run(() => {
  const model = { id: "m", name: "m", input: ["text"], contextWindow: 100000, maxTokens: 8192 };
  const provider = { ...apis[DIALECT], apiKey: KEY, models: [model] };
  writeFileSync("config.json", JSON.stringify({ models: { providers: { toolroll: provider } } }));
  const options = ["--config", "config.json", "--model", "toolroll/m", "--cwd", ".", TASK];
  return command("openclaw", ["agent", "exec", ...options], {
    OPENCLAW_NO_AUTO_UPDATE: "1",
    OPENCLAW_OFFLINE: "1",
  });
});
