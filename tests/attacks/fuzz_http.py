"""Hostile HTTP at every route of a running proxy.

    make fuzz-http REQUESTS=100000 SEED=7

SIGINT (Ctrl-C) ends it early, with its report.

Bodies of every dialect are mutated, compressed, truncated, or sent with a false length; so are
control calls, headers and framing. What must hold: no 500, no traceback in the log, `/health`
answers all the time, every session's record can be read, and no turn stays open.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import json
import random
import signal
import sys
import tempfile
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.attacks.victim import ADMIN_KEY, Victim, running_victim

PARALLEL = 16
SESSIONS = 8
REQUESTS_PER_SESSIONS = 2000
"""After this number of requests, the sessions' records are checked and the sessions replaced."""
ANSWER_TIMEOUT_S = 20.0
SLOW_PIECES, SLOW_S = 10, 0.05
"""A slow client sends its request in this number of pieces, and waits after each."""
UNREAD_S = 1.0
"""How long a client that does not read its answer keeps the connection."""
Body = dict[str, Any]

TOOL = {"name": "shell", "description": "Runs a command.", "parameters": {"type": "object"}}
BODIES: dict[str, Callable[[], Body]] = {
    "chat/completions": lambda: {
        "model": "m",
        "max_tokens": 16,
        "temperature": 0.5,
        "stop": ["END"],
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "List the files."}]},
            {
                "role": "assistant",
                "content": None,
                "reasoning_content": "Hm.",
                "tool_calls": [
                    {
                        "id": "call-1",
                        "type": "function",
                        "function": {"name": "shell", "arguments": '{"command": "ls", "n": 1.5}'},
                    }
                ],
            },
            {"role": "tool", "tool_call_id": "call-1", "content": "a.txt"},
        ],
        "tools": [{"type": "function", "function": TOOL}],
        "tool_choice": "auto",
        "stream_options": {"include_usage": True},
    },
    "completions": lambda: {"model": "m", "prompt": "Once upon", "max_tokens": 8, "n": 1},
    "responses": lambda: {
        "model": "m",
        "instructions": "Be brief.",
        "max_output_tokens": 16,
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "List the files."}]},
            {"type": "function_call", "call_id": "c", "name": "shell", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "a.txt"},
            {"type": "reasoning", "id": "r", "summary": []},
        ],
        "tools": [{"type": "function", **TOOL}],
        "text": {"format": {"type": "text"}},
    },
    "messages": lambda: {
        "model": "m",
        "max_tokens": 16,
        "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": "List the files."},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Hm.", "signature": ""},
                    {"type": "tool_use", "id": "t", "name": "shell", "input": {"command": "ls"}},
                ],
            },
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "t", "content": "a.txt"}],
            },
        ],
        "tools": [{"name": "shell", "input_schema": {"type": "object"}}],
    },
}
CONTROL: dict[str, Callable[[], Body]] = {
    "POST /sessions": lambda: {"kind": "train", "metadata": {"task": 1}, "ttl_s": 60},
    "POST /sessions/S/rewards": lambda: {"key": "k", "value": 1.0, "parts": {"a": 0.5}},
    "POST /sessions/S/complete": dict,
    "POST /engines": lambda: {"url": "http://127.0.0.1:9", "name": "e"},
    "DELETE /engines/e": dict,
    "POST /engines/resume": dict,
    "PUT /policies/default/version": lambda: {"version": 3},
    "GET /sessions": dict,
    "GET /sessions/S": dict,
    "GET /sessions/S/trajectories": dict,
    "GET /engines": dict,
    "GET /metrics": dict,
    "GET /openapi.json": dict,
    "GET /ready": dict,
    "DELETE /sessions/none": dict,
}
HEADER_NAMES = [
    *("Authorization", "x-api-key", "Host", "Origin", "Content-Type", "Accept", "Expect"),
    *("Sec-Fetch-Site", "x-stainless-retry-count", "Range", "Connection", "Upgrade"),
    *("X-Agentic-Proxy-Sibling", "X-Forwarded-For", "Content-Range", "traceparent", "Cookie"),
]
HEADER_VALUES = [
    *("", "\xff", "Bearer", "Bearer \xff\xfe", "Bearer  x  y", "Basic ****", "é", "-1", "9" * 40),
    *("http://evil.test", "evil.test", "null", "text/plain", "cross-site", "100-continue"),
    *("websocket", "close, upgrade", "x" * 5000, "\t", "*/*;q=nan", "application/json; charset=x"),
]
NASTY: list[Callable[[random.Random], Any]] = [
    lambda rng: None,
    lambda rng: rng.choice([True, False]),
    lambda rng: rng.choice([0, -1, 1, 2**31, 2**53 + 1, 2**63, 2**64, -(2**63) - 1, 10**400]),
    lambda rng: rng.choice([1.5, -0.0, 1e308, 5e-324]),
    lambda rng: rng.choice([float("nan"), float("inf"), float("-inf")]),
    lambda rng: rng.choice(["", " ", "\x00", "\ud800", "\udfff\ud800", "é" * 50, "\u202e", "🙂"]),
    lambda rng: rng.choice(["<|im_start|>", "<|im_end|>", "<tool_call>", "</think>", "{" * 300]),
    lambda rng: "x" * rng.choice([1, 1000, 100_000]),
    lambda rng: nested(rng.choice([5, 100, 253, 254, 255, 400, 900]), rng.choice("[{")),
    lambda rng: [],
    lambda rng: {},
    lambda rng: [None] * rng.choice([1, 100]),
    lambda rng: {"type": rng.choice(["text", "image_url", "input_image", "nothing", 7, None])},
    lambda rng: {"$ref": "#/definitions/loop"},
    lambda rng: [[[{}]]],
]


def nested(depth: int, kind: str) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value] if kind == "[" else {"a": value}
    return value


@dataclass(slots=True)
class Attack:
    """The bytes of one connection, and whether the proxy must answer them."""

    name: str
    data: bytes
    owed: bool = True


@dataclass(slots=True)
class Report:
    seed: int
    answers: Counter[int] = field(default_factory=Counter)
    unanswered: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    """Requests that got a 500, with the answer."""

    def summary(self) -> str:
        codes = " ".join(f"{status}:{n}" for status, n in sorted(self.answers.items()))
        return f"seed {self.seed}: {codes}; unanswered {len(self.unanswered)}"


class Fuzzer:
    def __init__(self, rng: random.Random, host: str, sessions: list[tuple[str, str]]) -> None:
        """`sessions`: (trial id, API key) each."""
        self.rng = rng
        self.host = host
        self.sessions = sessions

    def attack(self) -> Attack:
        kind = self.rng.choices(
            (self.body, self.control, self.encoding, self.framing, self.header, self.path),
            weights=(50, 15, 10, 10, 10, 5),
        )[0]
        return kind()

    def body(self) -> Attack:
        route, data = self._dialect_call()
        for _ in range(self.rng.choice([0, 1, 1, 1, 2, 4])):
            self._mutate(data)
        text = self._dump(data)
        if self.rng.random() < 0.1:
            text = self._damage(text)
        return Attack(f"POST {route}", self._request("POST", *self._call_target(route), text))

    def control(self) -> Attack:
        name = self.rng.choice(list(CONTROL))
        method, _, path = name.partition(" ")
        data = CONTROL[name]()
        if data and self.rng.random() < 0.8:
            self._mutate(data)
        trial, _ = self.rng.choice(self.sessions)
        path = path.replace("/S", f"/{trial}", 1) if "/S" in path else path
        key = self.rng.choice([ADMIN_KEY, ADMIN_KEY, ADMIN_KEY, "wrong", ""])
        if name == "POST /sessions/S/complete" and self.rng.random() < 0.95:
            path = "/sessions/none/complete"  # or soon every session refuses its calls
        if name in ("POST /engines", "DELETE /engines/e"):
            key = self.rng.choice(["wrong", ""])  # a foreign engine would take calls
        body = b"" if method == "GET" else self._dump(data)
        return Attack(name, self._request(method, path, {"Authorization": f"Bearer {key}"}, body))

    def encoding(self) -> Attack:
        route, data = self._dialect_call()
        plain = self._dump(data)
        claimed = self.rng.choice(
            ["gzip", "deflate", "br", "zstd", "identity", "none", "gzip, gzip"]
        )
        sent = self.rng.choice(
            [
                plain,
                gzip.compress(plain, 1),
                zlib.compress(plain),
                gzip.compress(plain, 1)[:-5],
                gzip.compress(b" " * self.rng.choice([10**6, 2 * 10**7]), 9),
                self.rng.randbytes(100),
                b"",
            ]
        )
        path, headers = self._call_target(route)
        headers["Content-Encoding"] = claimed
        return Attack(f"POST {route} as {claimed}", self._request("POST", path, headers, sent))

    def framing(self) -> Attack:
        route, data = self._dialect_call()
        path, headers = self._call_target(route)
        body = self._dump(data)
        key = headers["Authorization"].encode("utf-8", "replace")
        start = b"POST " + path.encode() + b" HTTP/1.1\r\nHost: " + self.host.encode()
        start += b"\r\nAuthorization: " + key + b"\r\nContent-Type: application/json\r\n"
        size = str(len(body)).encode()
        chunk = b"%x\r\n%s\r\n" % (len(body), body)
        lengths = b"Content-Length: " + size
        forms = {
            "cut body": start + lengths + b"0\r\n\r\n" + body,
            "two lengths": start + lengths + b"\r\nContent-Length: 1\r\n\r\n" + body,
            "negative length": start + b"Content-Length: -1\r\n\r\n" + body,
            "length of words": start + b"Content-Length: many\r\n\r\n" + body,
            "huge length": start + b"Content-Length: 99999999999999999999\r\n\r\n" + body,
            "chunks": start + b"Transfer-Encoding: chunked\r\n\r\n" + chunk + b"0\r\n\r\n",
            "chunk cut": start + b"Transfer-Encoding: chunked\r\n\r\n" + chunk[:-9],
            "bad chunk": start + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n" + body,
            "both": start
            + lengths
            + b"\r\nTransfer-Encoding: chunked\r\n\r\n"
            + chunk
            + b"0\r\n\r\n",
            "no end of head": start,
            "old version": start.replace(b"HTTP/1.1", b"HTTP/0.9") + b"\r\n",
            "no version": b"POST " + path.encode() + b"\r\n\r\n",
            "noise": self.rng.randbytes(200),
            "tls hello": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + self.rng.randbytes(200),
            "many headers": start + b"A: b\r\n" * 20_000 + b"\r\n",
            "long header": start + b"A: " + b"b" * 200_000 + b"\r\n\r\n",
            "nul in header": start + b"A: b\x00c\r\n" + lengths + b"\r\n\r\n" + body,
            "pipelined noise": start + lengths + b"\r\n\r\n" + body + self.rng.randbytes(50),
            "h2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        }
        name = self.rng.choice(list(forms))
        return Attack(name, forms[name], owed=False)

    def header(self) -> Attack:
        route, data = self._dialect_call()
        path, headers = self._call_target(route)
        name, value = self.rng.choice(HEADER_NAMES), self.rng.choice(HEADER_VALUES)
        headers[name] = value
        owed = name not in ("Expect", "Upgrade", "Connection")
        data_sent = self._request("POST", path, headers, self._dump(data))
        return Attack(f"{name}: {value[:30]!r}", data_sent, owed=owed)

    def path(self) -> Attack:
        odd = [
            "/%00",
            "/%ff%fe",
            "//",
            "/../../etc/passwd",
            "/%2e%2e/%2e%2e",
            "/a%2fb",
            "/" + "a/" * 500,
        ]
        odd += [
            "/" + "x" * 7000,
            "/v1",
            "/v1/",
            "/v1/v1/v1/models",
            "/sessions/%ff",
            "/sessions//x",
        ]
        odd += [
            "/sessions/a?since=x",
            "/sessions?limit=-1",
            "/sessions/x/events?after=%00",
            "/é",
            "/%",
        ]
        odd += [
            "/relay",
            "/\ud83d",
            "*",
            "http://other.test/v1/models",
            "/v1/models/%ff",
            "/v1/responses/x",
        ]
        method = self.rng.choice(
            ["GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "TRACE", "PATCH", "X"]
        )
        key = self.rng.choice([ADMIN_KEY, self.rng.choice(self.sessions)[1], ""])
        path = self.rng.choice(odd)
        headers = {"Authorization": f"Bearer {key}"}
        owed = path[0] == "/" and path.isascii()
        return Attack(f"{method} {path[:40]}", self._request(method, path, headers, b""), owed=owed)

    def _dialect_call(self) -> tuple[str, Body]:
        route = self.rng.choice(list(BODIES))
        data = BODIES[route]()
        if self.rng.random() < 0.3:
            data["stream"] = True
        if route == "messages" and self.rng.random() < 0.2:
            route = "messages/count_tokens"
        return route, data

    def _call_target(self, route: str) -> tuple[str, dict[str, str]]:
        trial, key = self.rng.choice(self.sessions)
        path = f"/{trial}/v1/{route}" if self.rng.random() < 0.5 else f"/v1/{route}"
        return path, {"Authorization": f"Bearer {key}"}

    def _mutate(self, data: Any) -> None:
        places: list[tuple[Any, Any]] = []
        _places(data, places)
        if not places:
            return
        holder, at = self.rng.choice(places)
        what = self.rng.random()
        if what < 0.15:
            del holder[at]
        elif what < 0.2 and isinstance(holder, dict):
            holder[self.rng.choice(["", "\x00", "__proto__", "type", "é", "x" * 300])] = 1
        elif what < 0.3 and isinstance(holder, list):
            holder.extend([holder[at]] * self.rng.choice([1, 3, 50]))
        else:
            holder[at] = self.rng.choice(NASTY)(self.rng)

    def _dump(self, data: Any) -> bytes:
        return json.dumps(data, ensure_ascii=self.rng.random() < 0.7).encode(
            "utf-8", "surrogatepass"
        )

    def _damage(self, text: bytes) -> bytes:
        at = self.rng.randrange(len(text) + 1)
        return self.rng.choice(
            [
                text[:at],
                text[:at] + self.rng.randbytes(1) + text[at:],
                b"\xef\xbb\xbf" + text,
                text + text,
                b"[" * 100_000,
                b'{"messages":' * 50_000,
                text[:-1] + b',"model":"n"}',
                text.decode("utf-8", "replace").encode("utf-16"),
            ]
        )

    def _request(self, method: str, path: str, headers: dict[str, str], body: bytes) -> bytes:
        all_headers = {
            "Host": self.host,
            "Content-Type": "application/json",
            "Connection": "close",
            "Content-Length": str(len(body)),
            **headers,
        }
        lines = [f"{method} {path} HTTP/1.1", *(f"{n}: {v}" for n, v in all_headers.items())]
        head = "\r\n".join(lines) + "\r\n\r\n"
        return head.encode("latin-1", "replace") + body


def _places(value: Any, found: list[tuple[Any, Any]], levels: int = 20) -> None:
    """Every (holder, key) in the first levels of a JSON value. Deeper ones are left alone: a
    nested value within a nested one could not be written."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in list(items):
        found.append((value, key))
        if levels and isinstance(inner, dict | list):
            _places(inner, found, levels - 1)


async def send(victim: Victim, attack: Attack, report: Report, rng: random.Random) -> None:
    try:
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(victim.host, victim.port)
            try:
                pieces = SLOW_PIECES if rng.random() < 0.02 else 1
                size = len(attack.data) // pieces + 1
                for start in range(0, len(attack.data), size):
                    writer.write(attack.data[start : start + size])
                    await writer.drain()
                    await asyncio.sleep(SLOW_S if pieces > 1 else 0)
                if not attack.owed:
                    writer.write_eof()
                manner = rng.random()
                if manner < 0.03:
                    return  # hangs up without reading
                if manner < 0.05:
                    await asyncio.sleep(UNREAD_S)
                    return  # reads nothing for a while, then hangs up
                answer = await reader.read(1 << 20)
            finally:
                writer.close()
    except ConnectionError:
        answer = b""
    except TimeoutError:
        report.broken.append(f"{attack.name}: no answer in {ANSWER_TIMEOUT_S:.0f} s")
        return
    note(attack, answer, report)


def note(attack: Attack, answer: bytes, report: Report) -> None:
    if not answer.startswith(b"HTTP/1."):
        if attack.owed:
            report.unanswered.append(attack.name)
        return
    status = int(answer[9:12])
    report.answers[status] += 1
    if status == 500:
        report.broken.append(f"{attack.name}: {answer[-300:]!r} to {attack.data[:2000]!r}")


async def fuzz(
    victim: Victim, requests: int, seed: int, stop: asyncio.Event | None = None
) -> Report:
    """Sends the requests, `PARALLEL` at a time, then looks at every record.

    `stop` ends it early.
    """
    rng, report = random.Random(seed), Report(seed)
    sessions = await _new_sessions(victim)
    fuzzer = Fuzzer(rng, f"{victim.host}:{victim.port}", sessions)
    left = iter(range(1, requests + 1))

    async def attacker() -> None:
        for number in left:
            if stop is not None and stop.is_set():
                return
            await send(victim, fuzzer.attack(), report, rng)
            if number % 200 == 0:
                victim.rss_bytes()
            if number % REQUESTS_PER_SESSIONS == 0:
                used, sessions[:] = list(sessions), await _new_sessions(victim)
                report.broken.extend(await _open_turns(victim, used))
                for trial, _ in used:
                    await victim.control.delete(trial)
                sys.stderr.write(f"{number} requests: {len(report.broken)} broken\n")

    async with asyncio.TaskGroup() as group:
        for _ in range(PARALLEL):
            group.create_task(attacker())
    report.broken += [f"traceback: {line}" for line in victim.tracebacks()]
    report.broken += await _open_turns(victim, sessions)
    return report


async def _new_sessions(victim: Victim) -> list[tuple[str, str]]:
    handles = [await victim.control.create_session() for _ in range(SESSIONS)]
    return [(handle.trial_id, handle.api_key) for handle in handles]


async def _open_turns(victim: Victim, sessions: list[tuple[str, str]]) -> list[str]:
    """The turns that are open without a call in flight; raises for a record that is not readable.
    Cut calls are given the time to close theirs."""
    trials = [trial for trial, _ in sessions]
    for _ in range(50):
        found = await victim.unclosed_turns(trials)
        if not found:
            return []
        await asyncio.sleep(0.1)
    return [f"turn stays open: {turn}" for turn in found]


async def _main(requests: int, seed: int) -> int:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, stop.set)
    sys.stderr.write(f"seed {seed}\n")
    with tempfile.TemporaryDirectory(prefix="fuzz-http-") as folder:
        async with running_victim(Path(folder)) as victim:
            before = victim.rss_bytes()
            report = await fuzz(victim, requests, seed, stop)
            after = victim.rss_bytes()
            mib = [round(size / 2**20) for size in (before, victim.peak_rss_bytes, after)]
    sys.stdout.write(f"{report.summary()}\n")
    sys.stdout.write(f"memory (MiB): {mib[0]} before, {mib[1]} at most, {mib[2]} after\n")
    kinds = Counter(line.partition(": ")[0] for line in report.broken)
    for kind, count in kinds.most_common(20):
        first = next(line for line in report.broken if line.startswith(kind))
        sys.stdout.write(f"BROKEN {count} times: {first[:1500]}\n")
    sys.stdout.write(f"{len(report.broken)} broken\n")
    return int(bool(report.broken))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    given = parser.parse_args()
    sys.exit(asyncio.run(_main(given.requests, given.seed)))
