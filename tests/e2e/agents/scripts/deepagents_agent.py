"""deepagents (LangChain, LangGraph) over Chat Completions or Responses."""

import os

from deepagents import create_deep_agent
from langchain_openai import ChatOpenAI
from shell_tool import run_command

model = ChatOpenAI(
    model=os.environ["OPENAI_MODEL"], use_responses_api=os.environ["DIALECT"] == "responses"
)
agent = create_deep_agent(model=model, tools=[run_command])
messages: list = []
for prompt in (os.environ["TASK_PROMPT"], "Go on."):
    messages = agent.invoke({"messages": [*messages, ("user", prompt)]})["messages"]
