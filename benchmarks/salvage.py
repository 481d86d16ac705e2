"""Sampled tokens per finished trial, with and without salvage.

Agents are processes that make `--turns` calls, on a proxy process and a scripted engine. Each
trial, also a retry or a continuation, is killed with the given probability, at a moment that is
uniform over its calls, in the middle of an answer. Both rows of a probability have the same
moments.

With probability p, starting over samples 1 + p / (2 (1 − p)) times the tokens of a trial that is
never killed: there are p / (1 − p) kills per finished trial, and each loses half a trial on
average. This is also the largest possible ratio, because a finished trial samples at least its own
tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from agent_loop.launchers.command import CommandConfig, CommandLauncher
from agent_loop.records import Rollout, RolloutStatus, Task
from agent_loop.remote_agent_loop import RemoteAgentLoop
from agent_loop.rewards.reported import LauncherReward
from agent_loop.trial.config import TrialConfig
from agent_loop.trial.salvage import SalvageConfig
from benchmarks.rollout import first_url, start_process
from proxy.client import ProxyClient
from proxy.records import SessionKind
from proxy.testing.scripted_engine import ScriptedEngine
from tests.proxy.checkpoint import write_checkpoint

ANSWER_TOKENS = 40
TOKEN_DELAY_S = 0.005
BOUND = 100
"""Trials of one rollout; none of them needs as many."""
AGENT = """
import json, os, pathlib, signal, urllib.request
task = json.loads(pathlib.Path(os.environ["TASK_FILE"]).read_text())
plan = pathlib.Path(task["plan"])
moment, *rest = json.loads(plan.read_text())
plan.write_text(json.dumps(rest))
url, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
headers = {"Content-Type": "application/json", "Authorization": "Bearer " + key}
messages = [{"role": "user", "content": "Begin."}]
for turn in range(task["turns"]):
    if moment is not None and turn == int(moment):
        signal.setitimer(signal.ITIMER_REAL, max(0.001, (moment - turn) * task["answer_s"]))
    body = json.dumps({"model": "m", "messages": messages}).encode()
    request = urllib.request.Request(url + "/chat/completions", body, headers)
    with urllib.request.urlopen(request) as response:
        said = json.load(response)["choices"][0]["message"]
    messages += [said, {"role": "user", "content": f"Go on with {turn + 1}."}]
    if moment is not None and turn == int(moment):
        os.kill(os.getpid(), signal.SIGKILL)
print("done")
"""


@dataclass(frozen=True, slots=True)
class Row:
    """What a policy sampled for all rollouts."""

    trials: int
    finished: int
    sampled_tokens: int
    continued: int
    diverged: int

    @property
    def tokens(self) -> float:
        """Per finished trial."""
        return self.sampled_tokens / max(1, self.finished)


def moments(rate: float, turns: int, rollout: int) -> list[float | None]:
    """When the trials of a rollout are killed, in calls; None: not at all."""
    random = np.random.default_rng([round(rate * 1000), rollout])
    return [
        float(random.uniform(0, turns)) if random.random() < rate else None for _ in range(BOUND)
    ]


async def measure(
    folder: Path, proxy: ProxyClient, engine: ScriptedEngine, plans: Sequence[str], turns: int,
    salvage: SalvageConfig | None,
) -> Row:  # fmt: skip
    """Runs one rollout per plan, four at a time."""
    agent, slots = folder / "agent.py", asyncio.Semaphore(4)
    agent.write_text(AGENT, encoding="utf-8")
    argv = (sys.executable, "-I", "-S", str(agent))
    loop = RemoteAgentLoop(
        proxy,
        CommandLauncher(CommandConfig(argv=argv)),
        LauncherReward(),
        folder / "trials",
        trial=TrialConfig(max_retries=BOUND, salvage=salvage, sandbox="off"),
    )

    async def rollout(number: int) -> Rollout:
        plan = folder / f"{number}.json"
        plan.write_text(plans[number], encoding="utf-8")
        data = {"plan": str(plan), "turns": turns, "answer_s": ANSWER_TOKENS * TOKEN_DELAY_S}
        async with slots:
            return await loop.run(Task(f"t{number}", data), kind=SessionKind.TRAIN)

    engine.calls.clear()
    rollouts = await asyncio.gather(*(rollout(number) for number in range(len(plans))))
    await loop.launcher.close()
    finished = [r for r in rollouts if r.status is RolloutStatus.DONE]
    return Row(
        trials=len(rollouts) + round(sum(r.metrics["failed_attempts"] for r in rollouts)),
        finished=len(finished),
        sampled_tokens=sum(len(call.answer_ids) for call in engine.calls),
        continued=round(sum(r.metrics["continuations"] for r in rollouts)),
        diverged=round(sum(r.metrics["diverged_continuations"] for r in rollouts)),
    )


async def compare(folder: Path, rates: Sequence[float], rollouts: int, turns: int) -> None:
    checkpoint = write_checkpoint(folder)
    answer = [*range(100, 100 + ANSWER_TOKENS)]
    async with ScriptedEngine(lambda _: answer, token_delay_s=TOKEN_DELAY_S) as engine:
        arguments = ["--engine", engine.url, "--model", str(checkpoint), "--port", "0"]
        server = start_process(
            "proxy", "serve", *arguments, "--store", f"sqlite:///{folder}/proxy.db"
        )
        try:
            async with ProxyClient(await asyncio.to_thread(first_url, server), "bench") as proxy:
                print("| killed | | trials | tokens per finished trial | ratio | possible |")
                print("|---|---|---|---|---|---|")
                for rate in rates:
                    plans = [json.dumps(moments(rate, turns, n)) for n in range(rollouts)]
                    await _print_rows(folder, proxy, engine, plans, turns, rate)
        finally:
            server.terminate()
            server.wait()


async def _print_rows(
    folder: Path, proxy: ProxyClient, engine: ScriptedEngine, plans: Sequence[str], turns: int,
    rate: float,
) -> None:  # fmt: skip
    over = await measure(folder, proxy, engine, plans, turns, None)
    salvage = SalvageConfig(max_continuations=BOUND)
    continued = await measure(folder, proxy, engine, plans, turns, salvage)
    possible = 1 + rate / (2 * (1 - rate))
    for name, row in (("started over", over), ("continued", continued)):
        print(
            f"| {rate:.0%} | {name} ({row.continued} continued, {row.diverged} diverged) "
            f"| {row.trials} for {row.finished} | {row.tokens:.0f} "
            f"| {over.tokens / row.tokens:.2f} | {possible:.2f} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.salvage", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--rates", type=float, nargs="+", default=[0.2, 0.5])
    parser.add_argument("--rollouts", type=int, default=60)
    parser.add_argument("--turns", type=int, default=8)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(compare(Path(folder), arguments.rates, arguments.rollouts, arguments.turns))


if __name__ == "__main__":
    main()
