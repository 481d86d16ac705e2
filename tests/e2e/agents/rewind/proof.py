"""`make rewind-proof`: varied trials of real agents, each run again to each of its turns.

Every run is a line of `DIR/AGENT.jsonl`, so that a measurement that was ended goes on with the
trials that it lacks. The table at the end is of all lines.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import sys
import tarfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

from agent_loop.launchers.command import CommandConfig, CommandLauncher
from agent_loop.launchers.harbor import RUN_FILE, HarborConfig, HarborLauncher
from agent_loop.launchers.protocol import Launcher
from agent_loop.records import Rollout, RolloutStatus, Task
from agent_loop.remote_agent_loop import RemoteAgentLoop
from agent_loop.rewards.reported import LauncherReward
from agent_loop.trial_config import TrialConfig
from proxy.config import RenderingConfig
from proxy.records import Origin, SessionKind
from proxy.rendering.rendering import Rendering
from proxy.rendering.tokenizer import load_tokenizer
from tests.e2e.agents.rewind.player import Player
from tests.e2e.agents.rewind.rewound import Rewinder, State, row
from tests.e2e.agents.rewind.varied import VariedTrial, varied_trial
from tests.e2e.agents.test_agents import AGENTS, PROMPT, example
from tests.e2e.harbor_server import harbor_server
from tests.harbor_sdk.harbor_tasks import write_task
from tests.proxy.checkpoint import write_checkpoint
from tests.proxy.conftest import RunningProxy, starting_proxies

TIMEOUT_S = 150.0
TERMINUS = "terminus_2"
RETRYING = ("claude_code", "codex", "opencode", "opencode_responses", "opencode_messages")
"""Agents that ask again after an answer that was cut. The others' trials have no faults."""
ABSOLUTE = ("qwen_code", "openhands")
"""Agents whose file tools take absolute paths only: they always run in the same folder."""
NAMES = (
    "claude_code", "codex", "opencode", "opencode_responses", "opencode_messages", "qwen_code",
    "mini_swe_agent", "openhands", TERMINUS,
)  # fmt: skip
_IN_PLACE = 'mount --bind "$PWD" "$0" && cd "$0" && exec "$@"'
_PACK = """#!/bin/bash
mkdir -p /logs/artifacts
tar -cf /logs/artifacts/app.tar -C /app .
echo '{"reward": 1.0}' > /logs/verifier/reward.json
"""


@dataclass(frozen=True, slots=True)
class Place:
    """Where the trials of one agent run."""

    folder: Path
    harbor_url: str | None

    def launcher(self, agent: str, root: Path | None) -> Launcher:
        """`root`: the path at which each run sees its own workspace."""
        if agent == TERMINUS:
            return HarborLauncher(
                HarborConfig(
                    agent_name="terminus-2",
                    agent_kwargs={"record_terminal_session": False},
                    harbor_server_url=self.harbor_url,
                )
            )
        command = example(agent)
        inner = ("unshare", "-m", "sh", "-c", _IN_PLACE, str(root)) if root else ()
        env = {"PATH": f"{AGENTS / 'bin'}:{os.environ['PATH']}", **command.env}
        return CommandLauncher(CommandConfig(argv=("env", *inner, *command.argv), env=env))

    def task(self, agent: str) -> Task:
        if agent != TERMINUS:
            return Task("hi", {"prompt": PROMPT})
        task = self.folder / "task" / "one"
        if not task.exists():
            limit = round(TIMEOUT_S)
            write_task(task.parent, "one", verify=_PACK, agent_timeout_s=limit)
        return Task("hi", {"local_task_path": str(task)})


def packed_state(state_dir: Path, rollout: Rollout) -> State:
    """The files of a Harbor trial's `/app`, from the archive that its verifier made."""
    run = json.loads((Path(rollout.logs or "") / RUN_FILE).read_text())
    (archive,) = state_dir.rglob(f"*{run['run_id']}*/**/app.tar")
    with tarfile.open(fileobj=BytesIO(archive.read_bytes())) as packed:
        found = {m.name: packed.extractfile(m) for m in packed if m.isfile()}
        return {name: file.read() for name, file in found.items() if file and "/.git/" not in name}


async def measure(
    agent: str,
    varied: VariedTrial,
    place: Place,
    proxy: RunningProxy,
    turns: Callable[[int], list[int]],
) -> AsyncIterator[dict[str, Any]]:
    """Records the trial and runs it again to `turns(number of its turns)`; one row per run."""
    trials = place.folder / f"{agent}-{varied.number}"
    in_place = agent in ABSOLUTE or varied.number % 2 == 1
    root = place.folder / "place" if in_place and agent != TERMINUS else None
    if root:
        root.mkdir(exist_ok=True)
    loop = RemoteAgentLoop(
        proxy.control,
        place.launcher(agent, root),
        LauncherReward(),
        trials,
        trial=TrialConfig(
            timeout_s=TIMEOUT_S,
            max_retries=0,
            keep_workspaces=True,
            sandbox="off" if root else "light",  # an agent in a sandbox cannot mount
        ),
    )

    async def run(origin: Origin | None) -> Rollout:
        return await loop.run(place.task(agent), kind=SessionKind.EVAL, origin=origin)

    state_dir = place.folder / "harbor"
    final = (lambda rollout: packed_state(state_dir, rollout)) if agent == TERMINUS else None
    player = Player(varied, f"{root}/" if root else "", proxy.engine.faults.append)
    rewinder = Rewinder(proxy, run, trials, player, final)
    try:
        recording = await rewinder.record()
        rollout = recording.rollout
        if rollout.status is not RolloutStatus.DONE:
            sys.stderr.write(f"{agent} {varied.number} FAILED: {rollout.error}\n")
            return
        good, count = True, len(recording.turns)
        for turn in turns(count):
            began = time.monotonic()
            found = row(await rewinder.rerun(recording, turn))
            ok = found["reached"] and found["workspace"] is None and found["first_prompt"]
            sys.stderr.write(f"{agent} {varied.number} to {turn}: {'ok' if ok else 'BAD'}\n")
            good = good and ok
            yield {"trial": varied.number, **found, "of": count, "s": time.monotonic() - began}
        if good:
            shutil.rmtree(trials)
    finally:
        await loop.close()


def read(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """All rows by agent."""
    return {
        file.stem: [json.loads(line) for line in file.read_text().splitlines()]
        for file in sorted(folder.glob("*.jsonl"))
    }


def table(rows: dict[str, list[dict[str, Any]]]) -> str:
    lines = [
        "| agent | trials | re-runs | reached k without a divergence | workspace equal | "
        "engine calls before k | first prompt exact | tolerated differences |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for agent, found in rows.items():
        reached = [each for each in found if each["reached"]]
        equal = sum(each["workspace"] is None for each in reached)
        exact = sum(each["first_prompt"] for each in reached)
        kinds = Counter[str]()
        for each in found:
            kinds.update(each["tolerated"])
        lines.append(
            f"| {agent} | {len({each['trial'] for each in found})} | {len(found)} "
            f"| {len(reached)} ({len(reached) / max(1, len(found)):.1%}) "
            f"| {equal} of {len(reached)} | {sum(each['early_calls'] for each in found)} "
            f"| {exact} of {len(reached)} "
            f"| {', '.join(f'{name} {count}' for name, count in kinds.most_common())} |"
        )
    return "\n".join(lines)


async def prove(given: argparse.Namespace, output: Path) -> None:
    """Runs the trials that are not in `output` yet; one after the other for each worker."""
    ends = time.monotonic() + given.seconds
    known = read(output)
    missing = [(agent, number) for number in range(given.trials) for agent in given.agents]
    with ExitStack() as stack:
        folder = output / f"work-{os.getpid()}"
        folder.mkdir(parents=True)
        server = None
        if any(agent == TERMINUS for agent, _ in missing):
            server = stack.enter_context(harbor_server(folder / "harbor"))
        checkpoint = write_checkpoint(folder)
        rendering = Rendering(load_tokenizer(checkpoint), RenderingConfig())
        place = Place(folder, server.url if server else None)

        async def work(number: int) -> None:
            own = folder / f"worker-{number}"
            own.mkdir()
            async with starting_proxies(checkpoint, rendering, own) as start:
                while missing and time.monotonic() < ends:
                    agent, trial = missing.pop(0)
                    rows = [each for each in known.get(agent, []) if each["trial"] == trial]
                    if rows and len(rows) >= len(given.turns or range(rows[0]["of"])):
                        continue
                    done = {each["turn"] for each in rows}

                    def lacking(count: int, done: set[int] = done) -> list[int]:
                        wanted = given.turns or range(1, count + 1)
                        return [turn for turn in wanted if turn <= count and turn not in done]

                    proxy = await start(max_context_tokens=131_072, limits={"engine_patience_s": 0})
                    varied = varied_trial(given.seed, trial, faults=agent in RETRYING)
                    with (output / f"{agent}.jsonl").open("a") as file:
                        async for each in measure(agent, varied, place, proxy, lacking):
                            file.write(json.dumps(each) + "\n")
                            file.flush()

        async with asyncio.TaskGroup() as group:
            for number in range(given.jobs):
                group.create_task(work(number))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--agents", nargs="+", choices=NAMES, default=list(NAMES))
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--turns", type=int, nargs="+", help="default: each turn of each trial")
    parser.add_argument("--seed", type=int, default=17)
    parser.add_argument("--jobs", type=int, default=1, help="trials at the same time")
    parser.add_argument("--seconds", type=float, default=float("inf"),
                        help="begin no trial after these")  # fmt: skip
    parser.add_argument("--out", type=Path, default=Path(".cache/rewind-proof"))
    given = parser.parse_args()
    output = given.out.absolute() / str(given.seed)
    asyncio.run(prove(given, output))
    rows = read(output)
    sys.stdout.write(table(rows) + "\n")
    bad = [each for found in rows.values() for each in found if not each["reached"]]
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
