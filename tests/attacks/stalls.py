"""Measures for how long a single hostile request keeps a proxy from answering other requests.

    python -m tests.attacks.stalls

A separate process requests `/health` every few milliseconds while the hostile requests arrive one
after the other. The program prints for each of them its status, its duration, the longest stall,
and the proxy's memory afterwards. A stall is a time without an answer of `/health`, but at most the
processor time that the proxy used meanwhile: the rest is due to other programs on the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from tests.attacks.victim import ADMIN_KEY, Victim, running_victim

BOUND_MS = 250.0
MIB = 2**20
INTERVAL_S = 0.005
ANSWER_TIMEOUT_S = 60.0
CHAT, MESSAGES, COUNT = "chat/completions", "messages", "messages/count_tokens"
SESSIONS = "/sessions"
USER = {"role": "user", "content": "Hello."}
SCHEMA = {"type": "object", "properties": {"command": {"type": "string"}}}


@dataclass(frozen=True, slots=True)
class Hostile:
    """A request: its name, its route, its body, and how the body is packed."""

    name: str
    route: str
    body: Callable[[], bytes]
    encoding: str = "identity"


def _json(**fields: Any) -> Callable[[], bytes]:
    return lambda: orjson.dumps({"model": "m", "max_tokens": 8, **fields})


def _tool(number: int, schema: Any = SCHEMA) -> dict[str, Any]:
    return {"type": "function", "function": {"name": f"tool_{number}", "parameters": schema}}


def _call(number: int, arguments: str) -> dict[str, Any]:
    function = {"name": "shell", "arguments": arguments}
    return {"id": f"call-{number}", "type": "function", "function": function}


def _wide_schema(properties: int) -> dict[str, Any]:
    names = (f"p{number}" for number in range(properties))
    return {"type": "object", "properties": {name: {"type": "string"} for name in names}}


def _text(size: int) -> str:
    return ("The command printed a list of files.\n" * (size // 37 + 1))[:size]


def _said(content: Any) -> Callable[[], bytes]:
    return _json(messages=[{"role": "user", "content": content}])


def _called(arguments: str, calls: int = 1) -> Callable[[], bytes]:
    answer = {"role": "assistant", "tool_calls": [_call(n, arguments) for n in range(calls)]}
    return _json(messages=[USER, answer])


def _formatted(schema: dict[str, Any]) -> Callable[[], bytes]:
    json_schema = {"name": "s", "schema": schema}
    return _json(
        messages=[USER], response_format={"type": "json_schema", "json_schema": json_schema}
    )


def _zipped(body: Callable[[], bytes]) -> Callable[[], bytes]:
    return lambda: gzip.compress(body(), 1)


ASKED = {"messages": [USER]}
PREFILLED = [USER, {"role": "assistant", "content": _text(5_000_000)}]
BLOCK = {"type": "text", "text": "a"}
NUMBERS = "[" + "1," * 8_000_000 + "1]"
FEWER_NUMBERS = "[" + "1," * 450_000 + "1]"
UNICODE = b'{"messages": [{"role": "user", "content": "%s"}]}'
TEN_THOUSAND_TOOLS = [_tool(number) for number in range(10_000)]

ATTACKS = (
    Hostile("one small message", CHAT, _json(**ASKED)),
    Hostile("10,000 tools", CHAT, _json(**ASKED, tools=TEN_THOUSAND_TOOLS)),
    Hostile("20,000 messages", CHAT, _json(messages=[USER] * 20_000)),
    Hostile("20,000 messages to count", COUNT, _json(messages=[USER] * 20_000)),
    Hostile("60,000 messages", CHAT, _json(messages=[USER] * 60_000)),
    Hostile("16 MB of []", CHAT, lambda: b'{"messages": [' + b"[]," * 5_300_000 + b"[]]}"),
    Hostile("16 MB of numbers", CHAT, lambda: b'{"messages": [' + b"1," * 8_000_000 + b"1]}"),
    Hostile("16 MB of escapes", CHAT, _said('"' * 8_000_000)),
    Hostile("16 MB of unicode escapes", CHAT, lambda: UNICODE % (b"\\u00e9" * 2_600_000)),
    Hostile("16 MB of surrogates", CHAT, lambda: UNICODE % (b"\\ud83d\\ude00" * 1_300_000)),
    Hostile("gzip of 200 MB of blanks", CHAT, _zipped(lambda: b" " * 200_000_000), "gzip"),
    Hostile("gzip of 16 MB of text", CHAT, _zipped(_said(_text(16_000_000))), "gzip"),
    Hostile("16 MB of text", CHAT, _said(_text(16_000_000))),
    Hostile("60 MB of text", CHAT, _said(_text(60_000_000))),
    Hostile("16 MB of one letter", CHAT, _said("a" * 16_000_000)),
    Hostile("900 kB of one letter", CHAT, _said("a" * 900_000)),
    Hostile("900 kB of blanks", CHAT, _said("x" + " " * 900_000 + "x")),
    Hostile("16 MB of a prompt", "completions", _json(prompt=_text(16_000_000))),
    Hostile("a prompt of 1,000,000 ids", "completions", _json(prompt=[7] * 1_000_000)),
    Hostile("8,000,000 levels", CHAT, lambda: b"[" * 8_000_000 + b"]" * 8_000_000),
    Hostile("60,000 tool calls", CHAT, _called('{"command": "ls"}', 60_000)),
    Hostile("arguments of 16 MB", CHAT, _called(NUMBERS)),
    Hostile("arguments of 900 kB", CHAT, _called(FEWER_NUMBERS)),
    Hostile("metadata of 16 MB", CHAT, _json(**ASKED, metadata={"a": "x" * 16_000_000})),
    Hostile("a session's metadata of 16 MB", SESSIONS, _json(metadata={"a": "x" * 16_000_000})),
    Hostile("1,000,000 stop strings", CHAT, _json(**ASKED, stop=["END"] * 1_000_000)),
    Hostile("a stop string of 16 MB", CHAT, _json(**ASKED, stop="x" * 16_000_000)),
    Hostile(
        "a logit_bias of 500,000",
        CHAT,
        _json(**ASKED, logit_bias={str(token): 1 for token in range(500_000)}),
    ),
    Hostile(
        "a logit_bias of 150,000",
        CHAT,
        _json(**ASKED, logit_bias={str(token): 1 for token in range(150_000)}),
    ),
    Hostile("a number of 1,000,000 digits", CHAT, lambda: b'{"n": ' + b"9" * 1_000_000 + b"}"),
    Hostile("300,000 digits in arguments", CHAT, _called('{"n": ' + "9" * 300_000 + "}")),
    Hostile("n: 128", CHAT, _json(**ASKED, n=128)),
    Hostile("a prefill of 5 MB", MESSAGES, _json(messages=PREFILLED)),
    Hostile("10,000 content blocks", MESSAGES, _said([BLOCK] * 10_000)),
    Hostile("150,000 content blocks", MESSAGES, _said([BLOCK] * 150_000)),
    Hostile("150,000 input items", "responses", _json(input=[USER] * 150_000)),
    Hostile(
        "a tool schema of 50,000 names",
        CHAT,
        _json(**ASKED, tools=[_tool(0, _wide_schema(50_000))]),
    ),
    Hostile("a response schema of 50,000 names", CHAT, _formatted(_wide_schema(50_000))),
    Hostile("a system prompt of 16 MB", MESSAGES, _json(**ASKED, system=_text(16_000_000))),
)


def watch(port: int, pid: int, marks: Connection) -> None:
    """Asks `/health` of the process `pid` until the pipe closes. Each mark received is answered
    with the longest stall in ms since the last mark."""
    asyncio.run(_watch(port, pid, marks))


async def _watch(port: int, pid: int, marks: Connection) -> None:
    async with aiohttp.ClientSession() as http:
        longest, last, used = 0.0, time.monotonic(), _processor_s(pid)
        while True:
            async with http.get(f"http://127.0.0.1:{port}/health") as response:
                await response.read()
            now, now_used = time.monotonic(), _processor_s(pid)
            longest = max(longest, min(now - last, now_used - used))
            last, used = now, now_used
            await asyncio.sleep(INTERVAL_S)
            while marks.poll():
                try:
                    marks.recv()
                except EOFError:
                    return
                marks.send(longest * 1000)
                longest = 0.0


def _processor_s(pid: int) -> float:
    """Seconds of processor time that the threads of a process have used."""
    total_ns = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):  # the thread has ended
            total_ns += int((task / "schedstat").read_text().split()[0])
    return total_ns / 1e9


async def measure(victim: Victim, attack: Hostile, marks: Connection) -> tuple[int, float, float]:
    """Status (0: no answer), seconds until the answer, longest stall of `/health` in ms."""
    session = await victim.control.create_session()
    body = await asyncio.to_thread(attack.body)
    of_control = attack.route.startswith("/")
    path = attack.route if of_control else f"/v1/{attack.route}"
    headers = {
        "Authorization": f"Bearer {ADMIN_KEY if of_control else session.api_key}",
        "Content-Type": "application/json",
        "Content-Encoding": attack.encoding,
    }
    await _mark(marks)
    began = time.monotonic()
    timeout = aiohttp.ClientTimeout(total=ANSWER_TIMEOUT_S)
    status = 0
    with suppress(TimeoutError, aiohttp.ClientConnectionError):  # refused before it was sent
        async with (
            aiohttp.ClientSession(timeout=timeout) as http,
            http.post(victim.url + path, data=body, headers=headers) as response,
        ):
            await response.read()
            status = response.status
    took_s = time.monotonic() - began
    await asyncio.sleep(0.1)  # includes the work that the proxy does after its answer
    return status, took_s, await _mark(marks)


async def _mark(marks: Connection) -> float:
    marks.send(None)
    longest_ms: float = await asyncio.to_thread(marks.recv)
    return longest_ms


async def main(only: str) -> int:
    """Prints the table; returns 1 if a request stalls `/health` for longer than the bound."""
    worst = 0.0
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="stalls-") as folder:
        async with running_victim(Path(folder)) as victim:
            ours, theirs = context.Pipe()
            watcher = context.Process(
                target=watch, args=(victim.port, victim.pid, theirs), daemon=True
            )
            watcher.start()
            theirs.close()
            await _mark(ours)
            sys.stdout.write(
                f"{'request':<45}{'status':>7}{'took, s':>9}{'stall, ms':>11}{'MiB':>7}\n"
            )
            for attack in ATTACKS:
                if only in attack.name:
                    status, took_s, stall_ms = await measure(victim, attack, ours)
                    line = f"{attack.name:<45}{status:>7}{took_s:>9.2f}{stall_ms:>11.0f}"
                    line += f"{victim.rss_bytes() / MIB:>7.0f}\n"
                    sys.stdout.write(line)
                    sys.stdout.flush()
                    worst = max(worst, stall_ms)
            ours.close()
            watcher.join(5)
    sys.stdout.write(f"longest: {worst:.0f} ms, the bound is {BOUND_MS:.0f} ms\n")
    return int(worst > BOUND_MS)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.attacks.stalls", description=__doc__)
    parser.add_argument("--only", default="", help="part of a request's name")
    sys.exit(asyncio.run(main(parser.parse_args().only)))
