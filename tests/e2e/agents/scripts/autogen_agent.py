"""AutoGen's AssistantAgent over Chat Completions."""

import asyncio
import os

from autogen_agentchat.agents import AssistantAgent
from autogen_ext.models.openai import OpenAIChatCompletionClient
from shell_tool import run_command

info = {
    "vision": False,
    "function_calling": True,
    "json_output": False,
    "structured_output": False,
    "family": "unknown",
}
client = OpenAIChatCompletionClient(model=os.environ["OPENAI_MODEL"], model_info=info)
agent = AssistantAgent("worker", client, tools=[run_command], max_tool_iterations=8)


async def main() -> None:
    for prompt in (os.environ["TASK_PROMPT"], "Go on."):
        await agent.run(task=prompt)


asyncio.run(main())
