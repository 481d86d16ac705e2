"""Strands Agents over Chat Completions, streamed. A truncated answer is an error, so it retries."""

import os

from shell_tool import run_command
from strands import Agent, tool
from strands.models.openai import OpenAIModel
from strands.types.exceptions import MaxTokensReachedException

agent = Agent(
    model=OpenAIModel(model_id=os.environ["OPENAI_MODEL"]),
    tools=[tool(run_command)],
    callback_handler=None,
)
for prompt in (os.environ["TASK_PROMPT"], "Go on."):
    try:
        agent(prompt)
    except MaxTokensReachedException as error:
        print(error)
