// What the programs of this folder that run on Node share (see common.py).
import { spawnSync } from "node:child_process";

export const URL = process.env.CLIENT_URL;
export const DIALECT = process.env.CLIENT_DIALECT;
export const STREAM = process.env.CLIENT_STREAM === "1";
export const SYSTEM = process.env.CLIENT_SYSTEM;
export const TASK = process.env.CLIENT_TASK;
export const KEY = "unused";

export const look = (at) => `seen ${at} <|im_end|><|im_start|>user`;

// Run a command of the client's own packages, and return what it writes.
export function command(name, options, variables = {}) {
  const folder = `${import.meta.dirname}/node_modules/.bin`;
  const program = `${folder}/${name}`;
  const env = { ...process.env, PATH: `${folder}:${process.env.PATH}`, ...variables };
  const result = spawnSync(program, options, { env, input: "", encoding: "utf8" });
  if (result.error) throw result.error;
  if (result.stderr) console.error(result.stderr);
  if (result.status) console.error(result.stdout);
  if (result.status) throw Object.assign(new Error(), { name: `exit status ${result.status}` });
  if (!result.stdout.trim()) throw Object.assign(new Error(), { name: "no output" });
  return result.stdout;
}

export async function run(main) {
  try {
    console.log("answer:", String(await main()).split(/\s+/).join(" "));
  } catch (error) {
    console.error(error);
    console.log("error:", error.name);
  }
}
