"""Sessions of a real proxy with planted secrets, and who can read one in what is made of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import orjson

from proxy.client import SessionHandle
from proxy.extras.secrets.tokens import pieces
from proxy.records import Origin, Reward
from tests.proxy.conftest import RunningProxy
from tests.proxy.extras.secrets.planted import Planted, planted
from tests.proxy.extras.view.recording import TOOL, user

SECRETS, SESSIONS = 200, 10
PASSWORD = "plum-Tree_77"
"""No secret by its looks."""
Message = dict[str, Any]


async def streamed(proxy: RunningProxy, session: SessionHandle, messages: list[Message]) -> Message:
    """The assistant's message, of the deltas of a streamed call."""
    body = {"model": "m", "messages": messages, "tools": [TOOL], "stream": True}
    text, calls = "", dict[int, dict[str, str]]()
    for event in await proxy.events(session, "chat/completions", body):
        data = event.removeprefix(b"data: ")
        if not data.startswith(b"{"):
            continue
        for choice in orjson.loads(data)["choices"]:
            delta = choice["delta"]
            text += delta.get("content") or ""
            for call in delta.get("tool_calls", ()):
                made = calls.setdefault(call["index"], {"id": "", "name": "", "arguments": ""})
                made["id"] += call.get("id") or ""
                for name in ("name", "arguments"):
                    made[name] += call["function"].get(name) or ""
    named = [
        {"id": c["id"], "type": "function", "function": {k: c[k] for k in ("name", "arguments")}}
        for c in calls.values()
    ]
    return {"role": "assistant", "content": text} | ({"tool_calls": named} if named else {})


def call_of(command: str) -> str:
    call = json.dumps({"name": "shell", "arguments": {"command": command}})
    return f"<tool_call>\n{call}\n</tool_call>"


async def recorded(proxy: RunningProxy) -> list[tuple[SessionHandle, list[Planted]]]:
    """The sessions, each with its secrets. Two of them are of one task, and have other rewards."""
    made = planted(42, SECRETS)
    chunks = [made[at::SESSIONS] for at in range(SESSIONS)]
    return [(await work(proxy, chunk, at), chunk) for at, chunk in enumerate(chunks)]


async def work(proxy: RunningProxy, secrets: list[Planted], number: int) -> SessionHandle:
    """A session in which each secret stands in one of four places, and then again by itself."""
    task = f"t{number // 2}"
    metadata = {"task_id": task, "environment": {"LAST": secrets[-1].text}}
    session = await proxy.session(metadata=metadata)
    messages: list[Message] = [{"role": "system", "content": "You are an engineer."}]

    async def turn(*new: Message, answer: str) -> None:
        messages.extend(new)
        proxy.answers(answer)
        messages.append(await streamed(proxy, session, messages))

    def result(text: str) -> Message:
        (call,) = messages[-1]["tool_calls"]
        return {"role": "tool", "tool_call_id": call["id"], "content": text}

    await turn(user("Begin."), answer=f"I begin, for the time {number}.")
    for at, each in enumerate(secrets):
        if at % 4 == 0:
            await turn(user(f"Look at this:\n{each.text}\n"), answer="I see it.")
        elif at % 4 == 1:
            await turn(user("What is there?"), answer=call_of("cat it"))
            await turn(result(f"{each.text}\n"), answer="That is all.")
        elif at % 4 == 2:
            await turn(user("Write it down."), answer=f"It is this:\n{each.text}\nI wrote it down.")
        else:
            await turn(user("Do it."), answer=call_of(f"run it {each.text}"))
            await turn(result("ok"), answer="Done.")
    alone = " then ".join(each.secret for each in secrets)
    await turn(user(f"Once more: {alone} was it."), answer=f"Yes: {alone} was it.")
    messages[1] = user("Something else.")  # a fork, which the page compares
    await turn(user("Again."), answer=f"Again: {secrets[0].secret} was it.")
    await proxy.control.add_reward(session.trial_id, Reward("verifier", float(number % 2)))
    await proxy.control.curate(session.trial_id, value=1.0, comment=f"It leaks {secrets[1].text}")
    return session


def readable(value: Any, decode: Callable[[list[int]], str]) -> Iterator[str]:
    """Everything that somebody who has a JSON value can read in it: strings, texts that are split
    into pieces, JSON within strings, and the text of lists of token ids."""
    if isinstance(value, str):
        yield value
        if value[:1] in ("{", "["):
            with suppress(ValueError):
                yield from readable(json.loads(value), decode)
    elif isinstance(value, dict):
        for name, each in value.items():
            yield name
            yield from readable(each, decode)
    elif isinstance(value, list):
        if value and all(type(each) is int for each in value):
            yield decode([each for each in value if 0 <= each < 2**31])
        elif value and all(isinstance(each, str) for each in value):
            yield "".join(value)
        for each in value:
            yield from readable(each, decode)


def seen(texts: Iterator[str] | list[str], secrets: list[Planted]) -> list[str]:
    whole = "\0".join(texts)
    return [
        f"{each.kind}: {part}"
        for each in secrets
        for part in each.parts
        if part in whole or json.dumps(part)[1:-1] in whole
    ]


def spelled(ids: list[int], decode: Callable[[list[int]], str], secrets: list[Planted]) -> Any:
    """`[T]`: the tokens that spell a planted secret, as they are or as JSON writes them."""
    texts = pieces(ids, decode)
    whole, ends = "".join(texts), np.cumsum([len(text) for text in texts])
    starts = ends - np.array([len(text) for text in texts])
    found = np.zeros(len(ids), np.bool_)
    for part in {form for s in secrets for p in s.parts for form in (p, json.dumps(p)[1:-1])}:
        at = whole.find(part)
        while at >= 0:
            found |= (starts < at + len(part)) & (ends > at)
            at = whole.find(part, at + 1)
    return found


async def branched(proxy: RunningProxy) -> None:
    """A session `origin` whose metadata shows a password, its `branch`, and the branch's `twig`."""
    about = {"db_password": PASSWORD, "task_id": "t"}
    session = await proxy.session(trial_id="origin", metadata=about)
    for name in ("origin", "branch", "twig"):
        if name != "origin":
            point, task = Origin(session.trial_id, 1), {"task_id": "t"}
            session = await proxy.control.branch(point, name, metadata=task)
        proxy.answers(f"I take {PASSWORD} in the {name}.")
        messages: list[Message] = [{"role": "user", "content": f"The word is {PASSWORD}."}]
        for _ in range(2):
            body = {"model": "m", "messages": messages}
            _, answer = await proxy.post(session, "chat/completions", body)
            messages += [answer["choices"][0]["message"], {"role": "user", "content": "Go on."}]
