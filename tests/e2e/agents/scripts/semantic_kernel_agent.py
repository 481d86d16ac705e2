"""Semantic Kernel's ChatCompletionAgent: it leaves out the text next to a tool call."""

import asyncio
import os

from semantic_kernel.agents import ChatCompletionAgent
from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion
from semantic_kernel.functions import kernel_function
from shell_tool import run_command


class Shell:
    @kernel_function(description="Runs a shell command.")
    def run_command(self, command: str, weight: float) -> str:
        return run_command(command, weight)


agent = ChatCompletionAgent(
    service=OpenAIChatCompletion(ai_model_id=os.environ["OPENAI_MODEL"]),
    name="worker",
    plugins=[Shell()],
)


async def main() -> None:
    thread = None
    for prompt in (os.environ["TASK_PROMPT"], "Go on."):
        answer = await agent.get_response(messages=prompt, thread=thread)
        thread = answer.thread


asyncio.run(main())
