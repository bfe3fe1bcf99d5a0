// pi's coding agent in print mode.
import { mkdirSync, writeFileSync } from "node:fs";
import { DIALECT, KEY, TASK, URL, command, run } from "./common.mjs";

const apis = {
  chat: { api: "openai-completions", baseUrl: `${URL}/v1` },
  responses: { api: "openai-responses", baseUrl: `${URL}/v1` },
  messages: { api: "anthropic-messages", baseUrl: URL },
};

await run(() => {
  const provider = { ...apis[DIALECT], apiKey: KEY, models: [{ id: "m" }] };
  mkdirSync(".pi/agent", { recursive: true });
  writeFileSync(".pi/agent/models.json", JSON.stringify({ providers: { toolroll: provider } }));
  const options = ["-p", "--offline", "--provider", "toolroll", "--model", "m"];
  return command("pi", [...options, TASK]);
});
