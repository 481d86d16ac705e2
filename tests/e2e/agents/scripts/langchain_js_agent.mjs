// LangChain JS over Chat Completions.
import { load, parameters, prompts, run_command } from "./packages.mjs";

const { createAgent, tool } = load("langchain");
const { ChatOpenAI } = load("@langchain/openai");

const model = new ChatOpenAI({
  model: process.env.OPENAI_MODEL,
  configuration: { baseURL: process.env.OPENAI_BASE_URL },
});
const described = { name: "run_command", description: "Runs it.", schema: parameters };
const agent = createAgent({ model, tools: [tool(run_command, described)] });
let messages = [];
for (const content of prompts) {
  const state = await agent.invoke({ messages: [...messages, { role: "user", content }] });
  messages = state.messages;
}
