"""Agno over Chat Completions."""

import os

from agno.agent import Agent
from agno.db.in_memory import InMemoryDb
from agno.models.openai.like import OpenAILike
from shell_tool import run_command

model = OpenAILike(
    id=os.environ["OPENAI_MODEL"],
    api_key=os.environ["OPENAI_API_KEY"],
    base_url=os.environ["OPENAI_BASE_URL"],
)
agent = Agent(
    model=model,
    tools=[run_command],
    db=InMemoryDb(),
    session_id="one",
    add_history_to_context=True,
    telemetry=False,
)
for prompt in (os.environ["TASK_PROMPT"], "Go on."):
    agent.run(prompt)
