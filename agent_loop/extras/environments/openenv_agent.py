"""An agent that acts in an environment of an OpenEnv server, in a process of its own.

Each observation is a message to the model, and each answer of the model is an action. Invariant:
the reward is the sum of what the server reported. After an answer that is not an action, the next
message to the model says so; a server that fails ends the agent without a reward.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
from websockets.sync.client import ClientConnection, connect

from proxy.machine.direct_hosts import proxy_for, with_direct_hosts

CALL_TIMEOUT_S = 600.0
"""Seconds for one answer of the model; the trial's own limit is usually shorter."""
MESSAGE_BYTES = 100 << 20
"""Maximum size of a message of the server, the same as in OpenEnv's own client."""
REFUSED = frozenset({"VALIDATION_ERROR"})
"""Codes of errors that the action caused."""
INSTRUCTIONS = (
    "You act in an environment. Each message of the user is an observation. Answer with one action "
    "as a JSON object and nothing else. The JSON schema of an action:\n{schema}"
)


class ActionError(Exception):
    """The model's answer is not an action of this environment."""


class ServerError(Exception):
    """The OpenEnv server reported an error."""


@dataclass(frozen=True, slots=True)
class OpenEnvCall:
    """An episode to play: `reset` has the arguments of the environment's reset."""

    url: str
    reset: Mapping[str, Any]
    instructions: str
    max_steps: int
    base_url: str
    api_key: str
    model: str
    seed: int


def play(call: OpenEnvCall) -> dict[str, float]:
    """The sum of the rewards, and the number of steps."""
    os.environ.update(with_direct_hosts(os.environ, call.url, call.base_url))  # httpx reads it
    with OpenEnvSession.opened(call.url) as episode, httpx.Client(timeout=CALL_TIMEOUT_S) as http:
        schema = http.get(f"{call.url}/schema").raise_for_status().json()["action"]
        text = call.instructions.replace("{schema}", json.dumps(schema))
        messages = [{"role": "system", "content": text}]
        observed = episode.send("reset", call.reset)
        total, steps = observed.reward, 0
        while not observed.done and steps < call.max_steps:
            messages.append({"role": "user", "content": observed.text})
            answer = _answer(http, call, messages)
            messages.append(answer)
            steps += 1
            try:
                observed = episode.send("step", action_of(answer["content"] or "", schema))
                total += observed.reward
            except ActionError as error:
                observed = Observed(f"This is not an action: {error}", 0.0, False)
        return {"reward": total, "steps": float(steps)}


def _answer(
    http: httpx.Client, call: OpenEnvCall, messages: list[dict[str, Any]]
) -> dict[str, Any]:
    response = http.post(
        f"{call.base_url}/chat/completions",
        headers={"Authorization": f"Bearer {call.api_key}"},
        json={"model": call.model, "messages": messages},
    )
    response.raise_for_status()
    answer: dict[str, Any] = response.json()["choices"][0]["message"]
    return answer


def action_of(answer: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    """The action that the model wrote: a JSON object, also in a code fence; or the value of the
    only required field.

    Raises:
        ActionError: the answer is neither.
    """
    text = answer.strip()
    if text.startswith("```") and text.endswith("```") and "\n" in text:
        text = text[text.index("\n") : -3].strip()
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = text
    if isinstance(value, dict):
        return value
    required = schema.get("required", [])
    if len(required) != 1:
        raise ActionError(f"write a JSON object with the fields {required}")
    wanted = schema.get("properties", {}).get(required[0], {})
    if wanted.get("type") == "string" and not isinstance(value, str):
        value = text  # the answer 42 to a field of text
    return {required[0]: value}


@dataclass(frozen=True, slots=True)
class Observed:
    """What the environment answered."""

    text: str
    """The observation as JSON."""
    reward: float
    done: bool


class OpenEnvSession:
    """A connection to the server, which has an environment of its own."""

    def __init__(self, connection: ClientConnection) -> None:
        self._connection = connection

    @classmethod
    @contextmanager
    def opened(cls, url: str) -> Iterator[OpenEnvSession]:
        address = "ws" + url.removeprefix("http") + "/ws"
        with connect(address, max_size=MESSAGE_BYTES, proxy=proxy_for(address)) as connection:
            yield cls(connection)

    def send(self, kind: str, data: Mapping[str, Any]) -> Observed:
        """Resets the environment, or makes a step.

        Raises:
            ActionError: the server refuses the action.
            ServerError: the environment failed.
        """
        self._connection.send(json.dumps({"type": kind, "data": dict(data)}))
        reply = json.loads(self._connection.recv())
        data = reply.get("data", {})
        if reply.get("type") == "error":
            error = ActionError if data.get("code") in REFUSED else ServerError
            raise error(data.get("message", "unknown error"))
        text = json.dumps(data.get("observation", {}), ensure_ascii=False)
        return Observed(text, float(data.get("reward") or 0.0), bool(data.get("done")))
