// Qwen Code without a terminal.
import { DIALECT, KEY, TASK, URL, command, run } from "./common.mjs";

const variables = { OPENAI_API_KEY: KEY, OPENAI_BASE_URL: `${URL}/v1`, OPENAI_MODEL: "m" };
const type = DIALECT === "responses" ? "openai-responses" : "openai";

await run(() => command("qwen", ["--auth-type", type, "--yolo", "-m", "m", TASK], variables));
