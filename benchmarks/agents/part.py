"""One of the processes of `python -m benchmarks.agents`: its share of the agents, each a coroutine.

Every agent is a trial of `RemoteAgentLoop`: session, agent, recording, reward, rollout. Only the
launcher is scripted; its agent makes streaming calls over HTTP and repeats a failed call as an SDK
does. Prints `open` when all of its sessions are open, begins when it reads a line, and prints
`done` when all trials have ended. `--log` gets a line for each trial: its id, and the marks of
the calls whose answers the agent got completely. `--result` gets what was measured, as JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import resource
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import orjson
import uvloop

from agent_loop.launchers.protocol import OVERHEAD_S
from agent_loop.records import AgentEnd, AgentResult, RolloutStatus, Task, Trial
from agent_loop.remote_agent_loop import RemoteAgentLoop
from agent_loop.rewards.reported import LauncherReward
from agent_loop.trial.config import RecordingConfig, TrialConfig
from proxy.client import ProxyClient
from proxy.records import SessionKind

ATTEMPTS = 12
MAX_BACKOFF_S = 8.0
"""As in OpenAI's SDK, which doubles its waits from 0.5 s on."""
RETRYABLE = frozenset({408, 409, 429, 500, 502, 503, 504})
"""As in OpenAI's SDK."""
PATIENCE_S = 300.0
KEY = "bench"
"""The admin key of the proxies."""
LAST_EVENT = b"data: [DONE]"


class ScriptedAgents:
    """A launcher whose agents are coroutines. All of them wait until `go` is set."""

    overhead_s = OVERHEAD_S

    def __init__(self, number: int, calls: int, tokens: int) -> None:
        self._number, self._calls, self._tokens = number, calls, tokens
        self.go = asyncio.Event()
        self.all_open = asyncio.Event()
        self.got: dict[str, list[str]] = {}
        """Trial → the marks of its answered calls."""
        self.failures: Counter[str] = Counter()
        """Why calls were repeated."""
        self.latencies_s: list[float] = []
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=PATIENCE_S)
        timeout = aiohttp.ClientTimeout(total=None, sock_read=PATIENCE_S)
        self._http = aiohttp.ClientSession(connector=connector, timeout=timeout)

    async def run(self, trial: Trial) -> AgentResult:
        got = self.got[trial.trial_id] = []
        if len(self.got) == self._number:
            self.all_open.set()
        await self.go.wait()
        messages: list[dict[str, str]] = []
        for call in range(self._calls):
            mark = f"{trial.trial_id} call {call}"
            messages.append({"role": "user", "content": mark})
            began = time.monotonic()
            answer = await self._answer(trial, messages)
            self.latencies_s.append(time.monotonic() - began)
            got.append(mark)
            messages.append({"role": "assistant", "content": answer})
        return AgentResult(AgentEnd.EXITED, reward=1.0)

    async def close(self) -> None:
        await self._http.close()

    async def _answer(self, trial: Trial, messages: list[dict[str, str]]) -> str:
        for attempt in range(ATTEMPTS):
            if attempt:
                await asyncio.sleep(min(0.5 * 2**attempt, MAX_BACKOFF_S))
            try:
                if (answer := await self._call(trial, messages, attempt)) is not None:
                    return answer
            except aiohttp.ClientError as error:
                self.failures[type(error).__name__] += 1
        raise RuntimeError(f"{trial.trial_id}: not answered in {ATTEMPTS} attempts")

    async def _call(self, trial: Trial, messages: list[dict[str, str]], attempt: int) -> str | None:
        """None: refused with a status after which SDKs try again, or cut."""
        body = {
            "model": trial.model,
            "messages": messages,
            "max_tokens": self._tokens,
            "stream": True,
        }
        headers = {
            "Authorization": f"Bearer {trial.api_key}",
            "Content-Type": "application/json",
            "x-stainless-retry-count": str(attempt),
        }
        url, data = f"{trial.base_url}/chat/completions", orjson.dumps(body)
        async with self._http.post(url, data=data, headers=headers) as response:
            content = await response.read()
        if response.status in RETRYABLE:
            self.failures[str(response.status)] += 1
            return None
        if response.status != 200:
            raise RuntimeError(f"{response.status} {content[:300]!r}")
        *events, last, _ = content.split(b"\n\n")
        if last != LAST_EVENT:
            self.failures["cut"] += 1
            return None
        chunks = [orjson.loads(e[len(b"data: ") :]) for e in events if e.startswith(b"data: ")]
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        return "".join(choice["delta"].get("content") or "" for choice in choices)


@asynccontextmanager
async def _lines() -> AsyncIterator[asyncio.StreamReader]:
    """Standard input."""
    reader = asyncio.StreamReader()
    connect = asyncio.get_running_loop().connect_read_pipe
    transport, _ = await connect(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    try:
        yield reader
    finally:
        transport.close()


async def _begin(agents: ScriptedAgents) -> None:
    async with _lines() as lines:
        await agents.all_open.wait()
        print("open", flush=True)
        await lines.readline()
    agents.go.set()


async def _run(given: argparse.Namespace) -> dict[str, object]:
    cpu_s = time.process_time()
    agents = ScriptedAgents(given.agents, given.calls, given.tokens)
    trial = TrialConfig(timeout_s=3600.0, max_retries=0, sandbox="off")
    proxy = ProxyClient(given.proxy, KEY, max_connections=32, timeout_s=PATIENCE_S)
    loop = RemoteAgentLoop(
        proxy,
        agents,
        LauncherReward(),
        given.folder,
        trial=trial,
        recording=RecordingConfig(patience_s=PATIENCE_S),
    )
    tasks = (Task(f"{given.folder.name}-{number}", {}) for number in range(given.agents))
    beginning = asyncio.create_task(_begin(agents))
    rollouts = await asyncio.gather(*(loop.run(t, kind=SessionKind.TRAIN) for t in tasks))
    beginning.cancel()
    await loop.close()
    given.log.write_bytes(b"".join(orjson.dumps(each) + b"\n" for each in agents.got.items()))
    failed = [rollout for rollout in rollouts if rollout.status is RolloutStatus.FAILED]
    return {
        "trials": len(rollouts),
        "failed": len(failed),
        "error": failed[0].error if failed else None,
        "turns": sum(rollout.num_turns for rollout in rollouts),
        "trained_tokens": sum(rollout.sampled_tokens for rollout in rollouts if rollout.trainable),
        "repeated": dict(agents.failures),
        "latencies_s": agents.latencies_s,
        "cpu_s": time.process_time() - cpu_s,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.agents.part", description=__doc__)
    parser.add_argument("--proxy", required=True)
    parser.add_argument("--agents", type=int, required=True)
    parser.add_argument("--calls", type=int, required=True)
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--result", type=Path, required=True)
    given = parser.parse_args()
    # To a file: a write of more than a pipe holds may be cut short after uvloop has used io_uring,
    # and an unbuffered stdout then drops the rest.
    given.result.write_bytes(orjson.dumps(uvloop.run(_run(given))))
    print("done", flush=True)


if __name__ == "__main__":
    main()
