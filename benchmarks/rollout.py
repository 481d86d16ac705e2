"""The gain of asynchronous production, and the cost of the loop itself.

1. *Schedules.* The real producers, a scripted engine and agents in virtual time (the clock jumps
   to the next timer; only durations are simulated). The time of an agent is log-normal with σ =
   1.2: 8 turns, half of the time sampling, half in its tools. The engine has 32 slots, 64 trials
   run at a time, a batch is 8 groups of 8, a training step takes 60 s and a weight update 2 s, the
   same for every row. Trainer and engine have separate devices.
2. *Overhead.* 1,000 concurrent trials through `RemoteAgentLoop`, with a real proxy process and a
   scripted engine process. Each agent is a shell that makes one call; all 1,000 wait at the same
   time. Reports CPU of the loop's process and of the command launcher's supervisors, per trial.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from agent_loop.launchers.command import CommandConfig, CommandLauncher
from agent_loop.producers.asynchronous import AsyncProducer
from agent_loop.producers.buffer import ReplayBuffer
from agent_loop.producers.rollout_config import RolloutConfig
from agent_loop.producers.sync import SyncProducer
from agent_loop.records import Rollout, RolloutStatus, Task
from agent_loop.remote_agent_loop import RemoteAgentLoop
from agent_loop.rewards.reported import LauncherReward
from agent_loop.tasks import Source, TaskStream
from agent_loop.trajectory import build_segments
from agent_loop.trial.config import TrialConfig
from proxy.client import ProxyClient
from proxy.records import Origin, SessionKind, Turn, TurnStatus, VersionSpan
from tests.agent_loop.virtual_time import run_in_virtual_time
from tests.proxy.checkpoint import write_checkpoint

SIGMA = 1.2
MEDIAN_S = 20.0
TURNS = 8
SLOTS = 32
TOKENS_PER_S = 50
TRAIN_S = 60.0
UPDATE_S = 2.0
BATCH = {"groups_per_step": 8, "group_size": 8, "concurrency": 64}


class Trials:
    """Trials whose agents take log-normal time. Measures how busy the engine is."""

    def __init__(self, version: Callable[[], int]) -> None:
        self.version = version
        self.engine = asyncio.Semaphore(SLOTS)
        self.busy_s = 0.0
        self.sampled_tokens = 0
        self.cancelled_tokens = 0

    async def run(
        self,
        task: Task,
        *,
        kind: SessionKind,
        seed: int = 0,
        version: int = 0,
        origin: Origin | None = None,
    ) -> Rollout:
        duration_s = np.random.default_rng(seed).lognormal(np.log(MEDIAN_S), SIGMA)
        part_s = duration_s / TURNS / 2
        turns: list[Turn] = []
        try:
            for index in range(TURNS):
                async with self.engine:
                    await asyncio.sleep(part_s)
                self.busy_s += part_s
                turns.append(_turn(index, turns, int(part_s * TOKENS_PER_S) + 1, self.version()))
                self.sampled_tokens += len(turns[-1].sampled_ids)
                await asyncio.sleep(part_s)
        except asyncio.CancelledError:
            self.cancelled_tokens += sum(len(turn.sampled_ids) for turn in turns)
            raise
        return Rollout(
            f"{task.task_id}-{seed}",
            task,
            RolloutStatus.DONE,
            float(seed % 2),
            build_segments(turns),
            started_version=version,
            seed=seed,
        )


def _turn(index: int, before: list[Turn], tokens: int, version: int) -> Turn:
    return Turn(
        "s",
        index,
        index - 1 if before else None,
        before[-1].path_tokens if before else 0,
        None,
        np.zeros(10, np.int32),
        b"",
        {},
        sampled_ids=np.zeros(tokens, np.int32),
        logprobs=np.zeros(tokens, np.float32),
        versions=(VersionSpan(version, 0, tokens),),
        status=TurnStatus.DONE,
    )


async def _schedule(policy: dict[str, Any] | None, steps: int) -> dict[str, float]:
    """One row of the table. None is the synchronous producer."""
    producer: SyncProducer | AsyncProducer
    current = [0]
    trials = Trials(lambda: current[0])
    stream = TaskStream([Source("a", [Task(f"a{i}", {}, "a") for i in range(1000)])], seed=0)
    if policy is None:
        producer = SyncProducer(trials, stream, RolloutConfig(**BATCH), seed=0)
    else:
        settings = RolloutConfig(**BATCH, **policy)
        producer = AsyncProducer(trials, stream, settings, seed=0, buffer=ReplayBuffer(":memory:"))
        producer.start(0)
    clock = asyncio.get_running_loop().time
    waited_s = 0.0
    staleness: list[int] = []
    for version in range(steps):
        began = clock()
        groups = await producer.next_batch(version)
        waited_s += clock() - began
        staleness += [version - group.oldest_version for group in groups]
        await asyncio.sleep(TRAIN_S + UPDATE_S)
        current[0] = version + 1
        if isinstance(producer, AsyncProducer):
            producer.set_version(version + 1)
    wall_s = clock()
    lost = trials.cancelled_tokens
    lost += producer.counts["tokens_dropped"] + producer.counts["tokens_masked"]
    if isinstance(producer, AsyncProducer):
        await producer.close()
    samples = steps * BATCH["groups_per_step"] * BATCH["group_size"]
    return {
        "samples/s": samples / wall_s,
        "engine idle": 1 - trials.busy_s / (SLOTS * wall_s),
        "trainer idle": waited_s / wall_s,
        "mean staleness": float(np.mean(staleness)),
        "max staleness": max(staleness),
        "stale groups": producer.counts["stale"] + producer.counts["cancelled"],
        "lost": lost / trials.sampled_tokens,
    }


def schedules(steps: int) -> None:
    rows: dict[str, dict[str, Any] | None] = {
        "synchronous": None,
        "staleness 1": {"max_staleness": 1},
        "staleness 2": {"max_staleness": 2},
        "staleness 4": {"max_staleness": 4},
        "staleness 2, old tokens masked": {"max_staleness": 2, "stale": "mask"},
        "staleness 2, tail batches of 4": {"max_staleness": 2, "tail_groups": 4},
    }
    print(f"schedules: {steps} steps of {BATCH['groups_per_step']} groups of {BATCH['group_size']}")
    print(
        "| | samples/s | ratio | engine idle | trainer idle | staleness | too old | tokens lost |"
    )
    print("|---|---|---|---|---|---|---|---|")
    first = 0.0
    for name, policy in rows.items():
        row = run_in_virtual_time(_schedule(policy, steps))
        first = first or row["samples/s"]
        print(
            f"| {name} | {row['samples/s']:.3f} | {row['samples/s'] / first:.2f} "
            f"| {row['engine idle']:.0%} | {row['trainer idle']:.0%} "
            f"| {row['mean staleness']:.2f} / {row['max staleness']:.0f} "
            f"| {row['stale groups']:.0f} | {row['lost']:.1%} |"
        )


AGENT = """
rest=${OPENAI_BASE_URL#http://}; host=${rest%%:*}; rest=${rest#*:}; port=${rest%%/*}
body='{"model": "m", "messages": [{"role": "user", "content": "Go."}]}'
exec 3<>/dev/tcp/$host/$port
printf 'POST /%s/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %s\r\n' \
    "${rest#*/}" "$OPENAI_API_KEY" >&3
printf 'Content-Type: application/json\r\nContent-Length: %s\r\nConnection: close\r\n\r\n%s' \
    ${#body} "$body" >&3
read -r _ status _ <&3; [ "$status" = 200 ]; ok=$?; cat <&3 >/dev/null; exit $ok
"""


async def _overhead(folder: Path, trials: int, answer_s: float) -> None:
    with _servers(folder, answer_s) as url:
        async with ProxyClient(url, "bench", max_connections=100) as proxy:
            launcher = CommandLauncher(CommandConfig(argv=("bash", "-c", AGENT)))
            loop = RemoteAgentLoop(
                proxy,
                launcher,
                LauncherReward(),
                folder / "trials",
                trial=TrialConfig(timeout_s=600, max_retries=0),
            )
            cpu_s, began = time.process_time(), time.monotonic()
            rollouts = await asyncio.gather(
                *(loop.run(Task(f"t{i}", {}), kind=SessionKind.TRAIN) for i in range(trials))
            )
            cpu_s, wall_s = time.process_time() - cpu_s, time.monotonic() - began
            await loop.close()
    done = [rollout for rollout in rollouts if rollout.status is RolloutStatus.DONE]
    if len(done) < trials:
        print(next(rollout.error for rollout in rollouts if rollout not in done))
    calls_s = [rollout.times_s["generate"] for rollout in done]
    supervisors_ms = np.mean([rollout.metrics["supervisor_cpu_s"] for rollout in done]) * 1e3
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"overhead: {len(done)} of {trials} trials at a time, done in {wall_s:.1f} s")
    print(f"  each waited {np.median(calls_s):.1f} s (median) for its one call")
    print(f"  loop's process: {cpu_s / trials * 1e3:.2f} ms CPU per trial, peak {peak_mib:.0f} MiB")
    print(f"  its supervisor and the fork of its agent: {supervisors_ms:.2f} ms CPU per trial")


@contextmanager
def _servers(folder: Path, answer_s: float) -> Iterator[str]:
    """Starts a scripted engine and a proxy as processes. Yields the proxy's URL."""
    tokens = 50
    engine = start_process(
        "proxy.testing.scripted_engine",
        *("--answer-tokens", str(tokens), "--token-delay-s", str(answer_s / tokens)),
    )
    try:
        engine_url = first_url(engine)
        checkpoint = write_checkpoint(folder)
        arguments = ["--engine", engine_url, "--model", str(checkpoint), "--port", "0"]
        proxy = start_process(
            "proxy", "serve", *arguments, "--store", f"sqlite:///{folder}/proxy.db"
        )
        try:
            yield first_url(proxy)
        finally:
            proxy.terminate()
            proxy.wait()
    finally:
        engine.terminate()
        engine.wait()


def start_process(module: str, *arguments: str) -> subprocess.Popen[str]:
    env = os.environ | {"AGENTIC_PROXY_ADMIN_KEY": "bench"}
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env, encoding="utf-8")


def first_url(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        for word in line.replace(",", " ").split():
            if word.startswith("http://"):
                return word
    raise SystemExit(f"{process.args!r} did not say where it listens")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.rollout", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--trials", type=int, default=1000)
    parser.add_argument("--answer-s", type=float, default=30.0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(_overhead(Path(folder), arguments.trials, arguments.answer_s))
    schedules(arguments.steps)


if __name__ == "__main__":
    main()
