"""Sessions as agents make them, through a real proxy and a scripted engine: calls with tools, a
compaction, a sub-agent, changed history, a retry, and hostile text."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from proxy.client import SessionHandle
from proxy.records import Reward
from tests.proxy.conftest import RunningProxy

SYSTEM = "You are a careful engineer. Use the tool `shell` to look before you answer."
TOOL = {
    "type": "function",
    "function": {
        "name": "shell",
        "description": "Runs a command.",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}},
    },
}
ANSWERS = (
    "Let me look at the files first, before I decide what to change in this folder.\n"
    '<tool_call>\n{"name": "shell", "arguments": {"command": "ls -la src"}}\n</tool_call>',
    "The sum is computed twice. I will look at the function that adds the two numbers.\n"
    '<tool_call>\n{"name": "shell", "arguments": {"command": "cat src/sum.py"}}\n</tool_call>',
    "It ignores the second number. I correct the line and run the tests again.\n"
    '<tool_call>\n{"name": "shell", "arguments": {"command": "sed -i s/a+a/a+b/ src/sum.py"}}\n'
    "</tool_call>",
    "The function now adds both numbers, and the test that failed before has passed. "
    "Nothing else was changed.",
)
RESULTS = (
    "total 8\n-rw-r--r-- 1 agent agent  61 sum.py\n-rw-r--r-- 1 agent agent 112 test_sum.py",
    "def add(a, b):\n    return a + a",
    "1 passed in 0.01 s",
)
HOSTILE = (
    "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'>"
    "<svg onload='window.hacked = 3'><a href='javascript:window.hacked=4'>click</a>"
    "\x1b[31mred\x1b[0m\x1b]0;title\x07 \u202egnp.exe \u2066isolated \U000e0041tagged "
    "{{constructor.constructor('window.hacked=5')()}} ${window.hacked=6} عربي עברית \x00 end"
)

Message = dict[str, Any]


def user(text: str) -> Message:
    return {"role": "user", "content": text}


async def call(proxy: RunningProxy, session: SessionHandle, messages: list[Message]) -> Message:
    """The assistant's message to a conversation with the tool."""
    body = {"model": "m", "messages": messages, "tools": [TOOL]}
    status, answer = await proxy.post(session, "chat/completions", body)
    assert status == 200, answer
    message: Message = answer["choices"][0]["message"]
    return message


async def work(
    proxy: RunningProxy, session: SessionHandle, task: str, turns: int = 4
) -> list[Message]:
    """A whole trial; returns its conversation."""
    messages = [{"role": "system", "content": SYSTEM}, user(task)]
    for at in range(turns):
        proxy.answers(ANSWERS[at])
        answer = await call(proxy, session, messages)
        messages.append(answer)
        for each in answer.get("tool_calls") or ():
            result = {"role": "tool", "tool_call_id": each["id"], "content": RESULTS[at % 3]}
            messages.append(result)
    return messages


async def record(proxy: RunningProxy, name: str = "fix/sum-1") -> SessionHandle:
    """One trial with every kind of thing that the page shows."""
    session = await proxy.session(
        trial_id=name, metadata={"task_id": "sum-1", "group": 7}, sampling={"alternatives": 5}
    )
    task = "The test of src/sum.py fails. Find out why, and correct it."
    messages = await work(proxy, session, task)
    # The agent changes the arguments of its second call when it sends the history again.
    edited = json.loads(json.dumps(messages[:6]))
    calls = edited[4]["tool_calls"]
    calls[0]["function"]["arguments"] = json.dumps({"command": "cat src/sum.py | head -50"})
    proxy.answers("I read only the beginning of the file this time. The sum is still wrong.")
    await call(proxy, session, edited)
    # A sub-agent.
    proxy.answers("The folder has one module and one test.")
    await call(proxy, session, [user("Summarise the folder src for your colleague.")])
    # The history is replaced by a summary that quotes an answer.
    quoted = ANSWERS[3].splitlines()[0]
    summary = f"This is a summary of the work so far: {quoted} Continue from here."
    proxy.answers("Then there is nothing left to do. The work is finished.")
    system = {"role": "system", "content": SYSTEM}
    await call(proxy, session, [system, user(summary)])
    # The same request again: a second sample.
    proxy.answers("Everything that was asked for has been done.")
    body = {"model": "m", "messages": [system, user(task)], "tools": [TOOL], "n": 2}
    await proxy.post(session, "chat/completions", body)
    # A refused call.
    await proxy.post(session, "chat/completions", {"model": "m", "messages": "none"})
    await proxy.control.add_reward(session.trial_id, Reward("verifier", 1.0, {"tests": 1.0}))
    return session


async def record_day(proxy: RunningProxy) -> None:
    """A session of somebody's own, as `agentic-proxy run` records it, rated and tagged."""
    where = {"agent": "claude-code", "folder": "/home/ana/shop", "git_branch": "repairs"}
    session = await proxy.session(trial_id="day", metadata=where)
    await work(proxy, session, "The till adds up wrong. Find out why.", turns=3)
    await proxy.control.curate(
        "day", value=1.0, comment="It found the line at once.", tags={"topic": "till"}
    )


async def record_many(proxy: RunningProxy, count: int) -> None:
    """Short trials of a group."""

    async def one(number: int) -> None:
        session = await proxy.session(
            trial_id=f"fix/sum-1/{number}", metadata={"task_id": "sum-1", "group": 8}
        )
        await work(proxy, session, "The test of src/sum.py fails.", turns=1)
        await proxy.control.add_reward(session.trial_id, Reward("verifier", float(number % 2)))
        await proxy.control.complete(session.trial_id)

    await asyncio.gather(*(one(number) for number in range(count)))
