"""Google's ADK, through LiteLLM over Chat Completions."""

import asyncio
import os

from google.adk.agents import LlmAgent
from google.adk.models.lite_llm import LiteLlm
from google.adk.runners import InMemoryRunner
from google.genai import types
from shell_tool import run_command

model = LiteLlm(model="openai/" + os.environ["OPENAI_MODEL"])
agent = LlmAgent(name="worker", model=model, tools=[run_command])


async def main() -> None:
    runner = InMemoryRunner(agent=agent, app_name="app")
    session = await runner.session_service.create_session(app_name="app", user_id="user")
    for prompt in (os.environ["TASK_PROMPT"], "Go on."):
        message = types.Content(role="user", parts=[types.Part(text=prompt)])
        async for _ in runner.run_async(user_id="user", session_id=session.id, new_message=message):
            pass


asyncio.run(main())
