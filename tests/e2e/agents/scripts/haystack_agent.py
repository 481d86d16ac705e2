"""Haystack's Agent over Chat Completions."""

import os

from haystack.components.agents import Agent
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import create_tool_from_function
from shell_tool import run_command

agent = Agent(
    chat_generator=OpenAIChatGenerator(model=os.environ["OPENAI_MODEL"]),
    tools=[create_tool_from_function(run_command)],
)
messages: list = []
for prompt in (os.environ["TASK_PROMPT"], "Go on."):
    messages = agent.run(messages=[*messages, ChatMessage.from_user(prompt)])["messages"]
