// Cline without a terminal.
import { mkdirSync, writeFileSync } from "node:fs";
import { DIALECT, KEY, TASK, URL, command, run } from "./common.mjs";

const names = { chat: "openai-compatible", messages: "anthropic" };

await run(() => {
  const provider = names[DIALECT];
  const settings = { provider, apiKey: KEY, model: "m", baseUrl: `${URL}/v1` };
  const saved = { settings, updatedAt: new Date(), tokenSource: "manual" };
  const file = { version: 1, lastUsedProvider: provider, providers: { [provider]: saved } };
  mkdirSync(".cline/data/settings", { recursive: true });
  writeFileSync(".cline/data/settings/providers.json", JSON.stringify(file));
  // without a daemon, which would outlive the command
  return command("cline", [TASK], { CLINE_SESSION_BACKEND_MODE: "local" });
});
