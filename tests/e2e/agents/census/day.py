"""A recorded day: two hours of varied work by one agent, in a few minutes.

    python -m tests.e2e.agents.census.day claude_code codex

The scripted policy writes, edits and reads files, looks at pictures, runs commands with long
outputs, delegates to sub-agents, and has its history compacted; the engine dies once in the middle
of an answer. A real agent makes about one call a minute, so that a day has 120 calls or more. The
figures are those of docs/notes/performance.md.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from agent_loop.records import Rollout, RolloutStatus
from agent_loop.trajectory import flatten
from proxy.conversation.recorded import load_conversation
from proxy.records import Turn, TurnStatus
from proxy.testing.scripted_engine import scripted_logprob
from tests.e2e.agents.census.__main__ import checkpoint
from tests.e2e.agents.census.agents import Agent, agents
from tests.e2e.agents.census.families import CONTEXT_TOKENS, FAMILIES, Writer
from tests.e2e.agents.census.hands import BLANKS, TEXT, Hands, delegated
from tests.e2e.agents.census.policy import Step, Written
from tests.e2e.agents.census.run import fork_reason, run_agent
from tests.proxy.conftest import StartProxy, starting_proxies

ROUNDS = 8
"""Of work in each of the two parts."""
COMPACT_TOKENS = 60_000
"""Where Codex compacts; Claude Code is told to."""
DIES_AT = 30
"""The answer in which the engine dies."""


@dataclass(frozen=True, slots=True)
class Day:
    """What a day has left."""

    agent: str
    rollout: Rollout
    turns: Sequence[Turn]
    written: Sequence[Written]
    threads: int
    """The main agent's history, once more after each compaction, and each sub-agent's."""
    paths: int
    """Leaves of the tree, without the ends of histories that a compaction replaced."""
    tokens: int
    """Tokens of all paths of the threads."""
    least_tokens: int
    """Tokens of the longest path of each thread."""

    @property
    def paths_ratio(self) -> float:
        return self.paths / self.threads

    @property
    def tokens_ratio(self) -> float:
        return self.tokens / self.least_tokens

    def replayed(self) -> bool:
        """Whether every trained token has the log-probability that the engine gave it, in the
        context in which it is trained, and is trained once."""
        trained = 0
        for path in flatten(self.rollout.segments):
            for at in np.flatnonzero(path.mask).tolist():
                wanted = scripted_logprob(int(path.ids[at - 1]), int(path.ids[at]))
                if path.logprobs[at] != np.float32(wanted):
                    return False
                trained += 1
        answered = [turn for turn in self.turns if turn.status is TurnStatus.DONE]
        return trained == sum(len(turn.sampled_ids) for turn in answered)

    def line(self) -> str:
        return (
            f"| {self.agent} | {len(self.turns)} | {self.threads} | {self.paths} | "
            f"{self.paths_ratio:.2f} | {self.tokens:,} | {self.tokens_ratio:.3f} |"
        )


def working_agent(name: str) -> Agent:
    """The agent as it works for a day: two parts, with a compaction in between or where its
    history has become long."""
    agent = agents()[name]
    if name == "claude_code":
        return replace(agent, argvs=(agent.argvs[0], agent.argvs[2], agent.argvs[3]))
    limit = ("-c", f"model_auto_compact_token_limit={COMPACT_TOKENS}")
    return replace(agent, argvs=tuple((*argv[:-1], *limit, argv[-1]) for argv in agent.argvs))


def work_of_a_day(agent: Agent, workspace: str, part: int) -> list[Step]:
    """ROUNDS rounds; each has another file, and every other one a picture and sub-agents."""
    steps: list[Step] = []
    for number in range(ROUNDS):
        steps += _round(agent.hands, f"{workspace}/part{part}-{number}.py", number)
        if number % 2:
            steps.append(Step((agent.hands.read(f"{workspace}/picture.png"),)))
        if number % 4 == 1:
            steps += _sub_agents(agent.name, f"{part}-{number}")
    return steps


def _round(hands: Hands, file: str, number: int) -> list[Step]:
    name = Path(file).name
    edited = TEXT.replace("  def f():\n\treturn", f"def f{number}():\n    return", 1)
    return [
        Step((hands.shell(f"ls -la; echo 'round {number}  é 😀'"),), text=f"Round {number}: 😀"),
        Step((hands.write(file, TEXT),), files={name: TEXT}),
        Step((hands.read(file), hands.shell(f"wc -c {name}"))),
        Step(
            (hands.edit(file, "  def f():\n\treturn", f"def f{number}():\n    return"),),
            files={name: edited},
        ),
        Step((hands.write(f"{file}.txt", BLANKS),)),
        Step((hands.shell(f"python3 {name}; seq 1 {500 * (number + 1)}"),)),
        Step((hands.edit(file, "nowhere to be found", ""),)),
    ]


def _sub_agents(name: str, task: str) -> list[Step]:
    if name == "claude_code":
        return delegated(
            "Agent", {"description": f"part {task}", "subagent_type": "general-purpose"}, task=task
        )
    spawn, wait = "multi_agent_v1.spawn_agent", "multi_agent_v1.wait_agent"
    seen = '{seen:"agent_id":"([^"]+)"}'
    return [
        *delegated(spawn, {}, prompt="message", task=task),
        Step(((wait, {"targets": [seen], "timeout_ms": 20_000}),)),
    ]


async def record_day(name: str, writer: Writer, start: StartProxy, folder: Path) -> Day:
    """One day of the agent `name`."""
    proxy = await start(max_context_tokens=CONTEXT_TOKENS, rendering={"renderer": writer.renderer})
    agent = working_agent(name)

    def plan(_: list[dict[str, Any]], workspace: str, part: int) -> list[Step]:
        return work_of_a_day(agent, workspace, part)

    _, policy, rollout, turns = await run_agent(
        agent, proxy, writer, folder, timeout_s=1500, plan=plan, dies_at=DIES_AT
    )
    return measure(agent, rollout, turns, policy.written)


def measure(
    agent: Agent, rollout: Rollout, turns: Sequence[Turn], written: Sequence[Written]
) -> Day:
    """A thread begins with the first turn, and at each fork that a compaction or a sub-agent
    makes; every other fork is one more path of its thread."""
    thread: dict[int, int] = {}
    for turn in turns:
        begins = turn.parent is None or (
            turn.fork_cause is not None and fork_reason(agent, turns, turn) is not None
        )
        thread[turn.index] = turn.index if begins else thread[turn.parent]  # type: ignore[index]
    inner = {
        t.parent for t in turns if t.parent is not None and thread[t.parent] == thread[t.index]
    }
    leaves = [turn for turn in turns if turn.index not in inner]
    longest: dict[int, int] = {}
    for turn in leaves:
        of = thread[turn.index]
        longest[of] = max(longest.get(of, 0), turn.path_tokens)
    return Day(
        agent=agent.name,
        rollout=rollout,
        turns=turns,
        written=written,
        threads=len(longest),
        paths=len(leaves),
        tokens=sum(turn.path_tokens for turn in leaves),
        least_tokens=sum(longest.values()),
    )


async def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.e2e.agents.census.day", description=__doc__
    )
    parser.add_argument("agents", nargs="+", choices=("claude_code", "codex"))
    parser.add_argument("--family", default="qwen3.5", choices=list(FAMILIES))
    given = parser.parse_args()
    folder = checkpoint(given.family)
    writer = Writer(FAMILIES[given.family], folder)
    print("| agent | calls | threads | paths | paths ÷ least | tokens of paths | ÷ least |")
    print("|---|---|---|---|---|---|---|")
    for name in given.agents:
        keep = Path(tempfile.mkdtemp(prefix=f"day-{name}-"))
        async with starting_proxies(folder, writer.rendering, keep) as start:
            day = await record_day(name, writer, start, keep)
        print(day.line(), flush=True)
        if day.rollout.status is not RolloutStatus.DONE or not day.replayed():
            print(f"{name}: {day.rollout.status} {day.rollout.error}, replayed {day.replayed()}")
        for turn in day.turns:
            if turn.fork_cause is not None:
                found = load_conversation(day.turns, turn.index)
                last = found.conversation.messages[-2:] if found else []
                reason = fork_reason(agents()[name], day.turns, turn)
                print(f"  {turn.index} {turn.fork_cause} {reason} {str(last)[:300]}")


if __name__ == "__main__":
    asyncio.run(main())
