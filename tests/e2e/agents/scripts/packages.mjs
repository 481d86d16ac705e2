// The packages that `make agents` installed, and the tool that every framework's agent gets.
import { spawnSync } from "node:child_process";
import { createRequire } from "node:module";

export const load = createRequire(process.env.PACKAGES + "/");
const { z } = load("zod");

export const parameters = z.object({ command: z.string(), weight: z.number() });
export const run_command = ({ command }) =>
  spawnSync("sh", ["-c", command], { encoding: "utf8" }).stdout;
export const prompts = [process.env.TASK_PROMPT, "Go on."];
