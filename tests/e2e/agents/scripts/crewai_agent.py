"""CrewAI over Chat Completions."""

import os

from crewai import LLM, Agent, Crew, Task
from crewai.tools import tool
from shell_tool import run_command

model = LLM(
    model="openai/" + os.environ["OPENAI_MODEL"],
    base_url=os.environ["OPENAI_BASE_URL"],
    api_key=os.environ["OPENAI_API_KEY"],
)
agent = Agent(
    role="Worker",
    goal="Do what you are told.",
    backstory="You work.",
    llm=model,
    tools=[tool(run_command)],
    max_iter=8,
)
task = Task(description=os.environ["TASK_PROMPT"], expected_output="What was done.", agent=agent)
Crew(agents=[agent], tasks=[task]).kickoff()
