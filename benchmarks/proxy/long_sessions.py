"""The cost of history: turns of a conversation that grows to 128k tokens, first turns of sessions
that share a long prompt, and memory."""

from __future__ import annotations

import asyncio
import statistics
import time
from dataclasses import dataclass
from typing import Any

import aiohttp
import numpy as np
import orjson

from benchmarks.proxy.targets import Target

WORDS = "The command printed a list of files; read each, then say what has changed and why. "
TURNS = 100
TOTAL_TOKENS = 128_000
NEIGHBOURS = 5
ANSWER_TOKENS = 200
"""Number of tokens that the fake vLLM answers per turn."""
NEW_TOKENS = TOTAL_TOKENS // TURNS
"""New tokens per turn: the answer before, and the user's text."""
GROUPS, GROUP = 8, 16
FIRST_PROMPT_TOKENS = 18_900
"""Of Claude Code's first prompt."""
WORDS_TOKENS = 23
"""Of WORDS, with the fake model's tokenizer."""


@dataclass(frozen=True, slots=True)
class TurnCost:
    turn: int
    prompt_tokens: int
    cpu_ms: float
    """CPU time of the proxy for this turn."""
    wall_ms: float
    plain_cpu_ms: float
    """CPU time of the pass-through for the same body."""
    bytes_ms: float
    """CPU time of parsing the agent's JSON, looking at each text once, and comparing the prompt's
    ids twice (tree and engine's route), which every proxy that records needs."""

    def rest_us(self, new_tokens: int) -> float:
        """What is left of `cpu_ms` per new token: without what the bytes of the history cost."""
        return 1e3 * (self.cpu_ms - self.plain_cpu_ms - self.bytes_ms) / new_tokens


async def turn_costs(target: Target, plain: Target, sessions: int) -> list[TurnCost]:
    """Medians over the sessions and over NEIGHBOURS turns, from turn 2 on and up to turn 100, and
    turn 1."""
    costs: dict[int, list[TurnCost]] = {1: [], NEIGHBOURS + 1: [], TURNS: []}
    async with aiohttp.ClientSession() as http:
        for number in range(sessions):
            url = target.url.replace("/s@S@/", f"/long-{number}/")
            messages: list[dict[str, Any]] = [{"role": "system", "content": WORDS}]
            for turn in range(1, TURNS + 1):
                body = turn_body(messages, number, turn)
                plain_s = plain.cpu_s()
                await _post(http, plain.url, body)
                plain_s = plain.cpu_s() - plain_s
                cpu_s, began = target.cpu_s(), time.perf_counter()
                answer = await _post(http, url, body)
                wall_s, cpu_s = time.perf_counter() - began, target.cpu_s() - cpu_s
                messages.append(answer["choices"][0]["message"])
                measured = next((t for t in costs if 0 <= t - turn < min(t, NEIGHBOURS)), None)
                if measured is not None:
                    prompt_tokens = answer["usage"]["prompt_tokens"]
                    bytes_ms = _bytes_ms(body, prompt_tokens)
                    ms = (cpu_s * 1e3, wall_s * 1e3, plain_s * 1e3, bytes_ms)
                    costs[measured].append(TurnCost(turn, prompt_tokens, *ms))
    return [_median(found) for found in costs.values()]


async def first_turn_costs(target: Target, plain: Target) -> list[TurnCost]:
    """The first session with a long prompt, the median of the GROUPS x GROUP sessions that share
    it, and the median of as many sessions with a short prompt."""
    system = {"role": "system", "content": WORDS * (FIRST_PROMPT_TOKENS // WORDS_TOKENS)}
    groups: dict[str, list[TurnCost]] = {}
    async with aiohttp.ClientSession() as http:
        for number in range(2 * GROUPS * GROUP):
            kind = "long" if number % 2 else "short"
            task = {"role": "user", "content": f"Task {number // 2 // GROUP}: say what it is."}
            messages = [system, task] if kind == "long" else [task]
            body = orjson.dumps({"model": "fake", "messages": messages})
            plain_s = plain.cpu_s()
            await _post(http, plain.url, body)
            plain_s = plain.cpu_s() - plain_s
            cpu_s, began = target.cpu_s(), time.perf_counter()
            url = target.url.replace("/s@S@/", f"/first-{number}/")
            answer = await _post(http, url, body)
            wall_s, cpu_s = time.perf_counter() - began, target.cpu_s() - cpu_s
            tokens = answer["usage"]["prompt_tokens"]
            ms = (cpu_s * 1e3, wall_s * 1e3, plain_s * 1e3, _bytes_ms(body, tokens))
            groups.setdefault(kind, []).append(TurnCost(1, tokens, *ms))
    return [groups["long"][0], _median(groups["long"][1:]), _median(groups["short"][1:])]


async def memory_mb(target: Target, sessions: int) -> tuple[float, float]:
    """Resident MB before, and after `sessions` sessions of 128k tokens that stay open."""
    before = target.resident_bytes()
    text = _text(0, 0, tokens=TOTAL_TOKENS)
    gate = asyncio.Semaphore(4)
    timeout = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(timeout=timeout) as http:

        async def open_session(number: int) -> None:
            url = target.url.replace("/s@S@/", f"/big-{number}/")
            message = {"role": "user", "content": f"{number} {text}"}
            async with gate:
                await _post(http, url, orjson.dumps({"model": "fake", "messages": [message]}))

        await asyncio.gather(*(open_session(n) for n in range(sessions)))
    return before / 1e6, target.resident_bytes() / 1e6


def turn_body(messages: list[dict[str, Any]], session: int, turn: int) -> bytes:
    """The request of a turn; adds the user's text to the conversation."""
    messages.append({"role": "user", "content": _text(session, turn)})
    return orjson.dumps({"model": "fake", "messages": messages})


def _text(session: int, turn: int, tokens: int = TOTAL_TOKENS // TURNS - ANSWER_TOKENS) -> str:
    """A text of about this number of tokens that no other turn has."""
    return f"Session {session}, turn {turn}. " + WORDS * (tokens // 27)


def _bytes_ms(body: bytes, prompt_tokens: int) -> float:
    ids = np.arange(prompt_tokens, dtype=np.int32)
    times = []
    for _ in range(5):
        same = ids.copy()
        began = time.process_time()
        for message in orjson.loads(body)["messages"]:
            hash(message["content"])
        np.array_equal(ids, same)
        np.array_equal(ids, same)
        times.append(time.process_time() - began)
    return statistics.median(times) * 1e3


def _median(found: list[TurnCost]) -> TurnCost:
    def middle(name: str) -> Any:
        return statistics.median(getattr(cost, name) for cost in found)

    names = ("turn", "prompt_tokens", "cpu_ms", "wall_ms", "plain_cpu_ms", "bytes_ms")
    return TurnCost(*(middle(name) for name in names))


async def _post(http: aiohttp.ClientSession, url: str, body: bytes) -> dict[str, Any]:
    async with http.post(url, data=body) as response:
        answer: dict[str, Any] = orjson.loads(await response.read())
        if response.status != 200:
            raise SystemExit(f"{url}: {response.status} {answer}")
        return answer
