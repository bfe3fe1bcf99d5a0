// Codex without a terminal.
import { KEY, TASK, URL, command, run } from "./common.mjs";

const settings = {
  model_provider: "toolroll",
  "model_providers.toolroll.name": "toolroll",
  "model_providers.toolroll.base_url": `${URL}/v1`,
  "model_providers.toolroll.wire_api": "responses",
  "model_providers.toolroll.env_key": "TOOLROLL_KEY",
};
const options = Object.entries(settings).flatMap(([name, value]) => ["-c", `${name}="${value}"`]);
options.push("--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "-m", "m");

await run(() => command("codex", ["exec", ...options, TASK], { TOOLROLL_KEY: KEY }));
