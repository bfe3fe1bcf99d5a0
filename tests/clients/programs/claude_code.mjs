// Claude Code without a terminal.
import { KEY, TASK, URL, command, run } from "./common.mjs";

const variables = {
  ANTHROPIC_BASE_URL: URL,
  ANTHROPIC_API_KEY: KEY,
  ANTHROPIC_MODEL: "m",
  CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC: "1",
};

await run(() => command("claude", ["-p", "--allowedTools", "Bash", "--", TASK], variables));
