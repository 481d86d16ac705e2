// The Vercel AI SDK in all three dialects, streamed.
import { load, parameters, prompts, run_command } from "./packages.mjs";

const { stepCountIs, streamText, tool } = load("ai");
const name = process.env.OPENAI_MODEL;
const baseURL = process.env.OPENAI_BASE_URL;
const apiKey = process.env.OPENAI_API_KEY;
const makeModel = {
  chat: () => load("@ai-sdk/openai-compatible").createOpenAICompatible({ name, baseURL, apiKey })(name),
  responses: () => load("@ai-sdk/openai").createOpenAI({ baseURL, apiKey }).responses(name),
  messages: () => load("@ai-sdk/anthropic").createAnthropic({ baseURL, apiKey })(name),
};
const model = makeModel[process.env.DIALECT]();
const tools = {
  run_command: tool({ description: "Runs it.", inputSchema: parameters, execute: run_command }),
};
let messages = [];
for (const content of prompts) {
  messages = [...messages, { role: "user", content }];
  const result = streamText({ model, messages, tools, stopWhen: stepCountIs(8) });
  await result.consumeStream();
  messages = [...messages, ...(await result.responseMessages)];
}
