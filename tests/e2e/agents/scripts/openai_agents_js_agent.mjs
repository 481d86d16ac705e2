// The OpenAI Agents SDK for JavaScript, over Responses or Chat Completions.
import { load, parameters, prompts, run_command } from "./packages.mjs";

const { Agent, run, setOpenAIAPI, setTracingDisabled, tool, user } = load("@openai/agents");

setTracingDisabled(true);
setOpenAIAPI(process.env.DIALECT === "chat" ? "chat_completions" : "responses");
const agent = new Agent({
  name: "worker",
  model: process.env.OPENAI_MODEL,
  tools: [tool({ name: "run_command", description: "Runs it.", parameters, execute: run_command })],
});
let history = [];
for (const prompt of prompts) {
  history = [...history, user(prompt)];
  try {
    history = (await run(agent, history)).history;
  } catch (error) {
    if (!/incomplete/.test(error.message)) throw error;
    break; // with Responses an answer that is cut ends the run, and its history is lost
  }
}
