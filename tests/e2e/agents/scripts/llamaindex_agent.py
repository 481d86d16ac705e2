"""LlamaIndex's FunctionAgent over Chat Completions, streamed."""

import asyncio
import os

from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.memory import ChatMemoryBuffer
from llama_index.llms.openai_like import OpenAILike
from shell_tool import run_command

model = OpenAILike(
    model=os.environ["OPENAI_MODEL"],
    api_key=os.environ["OPENAI_API_KEY"],
    api_base=os.environ["OPENAI_BASE_URL"],
    is_chat_model=True,
    is_function_calling_model=True,
    context_window=100_000,
)
agent = FunctionAgent(tools=[run_command], llm=model)


async def main() -> None:
    memory = ChatMemoryBuffer.from_defaults(token_limit=100_000)
    for prompt in (os.environ["TASK_PROMPT"], "Go on."):
        await agent.run(prompt, memory=memory)


asyncio.run(main())
