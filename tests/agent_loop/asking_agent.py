"""An agent in the test's own process: a conversation with one question per model name."""

from __future__ import annotations

from typing import Any

import aiohttp

from agent_loop.records import AgentEnd, AgentResult, Trial


class AskingAgent:
    """A launcher. Example: AskingAgent("policy", "small-model")"""

    overhead_s = 60.0

    def __init__(self, *models: str, max_tokens: int = 8) -> None:
        self._models = models
        self._max_tokens = max_tokens

    async def run(self, trial: Trial) -> AgentResult:
        messages: list[dict[str, Any]] = []
        headers = {"Authorization": f"Bearer {trial.api_key}"}
        async with aiohttp.ClientSession(headers=headers) as http:
            for model in self._models:
                messages.append({"role": "user", "content": f"{trial.task.task_id}, {model}?"})
                body = {"model": model, "messages": messages, "max_tokens": self._max_tokens}
                async with http.post(f"{trial.base_url}/chat/completions", json=body) as response:
                    assert response.status == 200, await response.text()
                    answer = await response.json()
                messages.append(answer["choices"][0]["message"])
        return AgentResult(AgentEnd.EXITED)

    async def close(self) -> None:
        pass
