"""The agent and the grader of `chaos_train`: two calls, and the share of one letter in the answers.

A call is repeated while the proxy is away, as every SDK does.
"""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agent_loop.launchers.calls import AgentCall, GradeCall

TURNS = 2
MAX_TOKENS = 24
AGAIN_S = 0.1


def run(call: AgentCall) -> None:
    messages = [{"role": "user", "content": call.prompt}]
    for _ in range(TURNS):
        messages += [_answer(call, messages), {"role": "user", "content": "Go on."}]
    said = "".join(message["content"] for message in messages[1::2])
    (call.workspace / "answer").write_text(said)


def grade(call: GradeCall) -> float:
    said = (call.workspace / "answer").read_text()
    return said.count("a") / max(len(said), 1)


def _answer(call: AgentCall, messages: list[dict[str, str]]) -> dict[str, str]:
    body = {"model": call.model, "messages": messages, "max_tokens": MAX_TOKENS}
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {call.api_key}"}
    url = f"{call.base_url}/chat/completions"
    while True:
        try:
            request = urllib.request.Request(url, json.dumps(body).encode(), headers)
            with urllib.request.urlopen(request) as response:
                message: dict[str, str] = json.loads(response.read())["choices"][0]["message"]
                return message
        except urllib.error.HTTPError as error:
            if error.code not in (429, 503):
                raise
        except (OSError, http.client.HTTPException):
            pass
        time.sleep(AGAIN_S)  # the client's back-off
