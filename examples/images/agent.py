"""The agent: shows the model each screen of its task, and presses where it says.

An ordinary program on the OpenAI SDK, which contains nothing about training. The pictures are
base64 in the requests, all of them again in each request, as agents do.
"""

from __future__ import annotations

import base64
import json
import os
from typing import TYPE_CHECKING, Any

from openai import OpenAI
from screens import PROMPT, Screen, screens

if TYPE_CHECKING:
    from agent_loop.launchers.calls import AgentCall

_CLIENT = OpenAI(
    base_url=os.environ.get("OPENAI_BASE_URL", "http://each-trial-has-its-own"),
    api_key=os.environ.get("OPENAI_API_KEY", "each-trial-has-its-own"),
)
_CLIENT.chat.completions  # noqa: B018 (the SDK imports this part when it is first used)


def run(call: AgentCall) -> None:
    """The agent as a function, for the `python` launcher."""
    client = _CLIENT.with_options(base_url=call.base_url, api_key=call.api_key)
    messages: list[Any] = []
    pressed = []
    for screen in screens(call.task["seed"]):
        messages.append({"role": "user", "content": shown(screen)})
        answer = client.chat.completions.create(model=call.model, messages=messages, max_tokens=8)
        said = answer.choices[0].message
        messages.append(said.to_dict(exclude_none=True))
        pressed.append(said.content or "")
    (call.workspace / "pressed.json").write_text(json.dumps(pressed), encoding="utf-8")


def shown(screen: Screen) -> list[dict[str, Any]]:
    """The content of a message: the screen, and what is to be done."""
    url = "data:image/png;base64," + base64.b64encode(screen.png()).decode()
    return [
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "text", "text": PROMPT},
    ]
