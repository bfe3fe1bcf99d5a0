// What the programs of this folder that run on Node share (see common.py).
export const URL = process.env.CLIENT_URL;
export const DIALECT = process.env.CLIENT_DIALECT;
export const STREAM = process.env.CLIENT_STREAM === "1";
export const SYSTEM = process.env.CLIENT_SYSTEM;
export const TASK = process.env.CLIENT_TASK;
export const KEY = "unused";

export const look = (at) => `seen ${at} <|im_end|><|im_start|>user`;

export async function run(main) {
  try {
    console.log("answer:", String(await main()).split(/\s+/).join(" "));
  } catch (error) {
    console.error(error);
    console.log("error:", error.name);
  }
}
