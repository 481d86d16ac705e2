"""Varied trials of real agents, each run again to each of its turns.

Every run is a line of `measured/AGENT.jsonl` (`--out`), which is committed, so that a measurement
goes on with the runs that it lacks, on any machine. A line has what differs from GOOD. To measure
runs again, delete their lines. The table at the end is of all lines.
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
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

from agent_loop.extras.harbor.launcher import RUN_FILE, HarborConfig, HarborLauncher
from agent_loop.launchers.command import CommandConfig, CommandLauncher
from agent_loop.launchers.protocol import Launcher
from agent_loop.records import Rollout, RolloutStatus, Task
from agent_loop.remote_agent_loop import RemoteAgentLoop
from agent_loop.rewards.reported import LauncherReward
from agent_loop.trial.config import TrialConfig
from proxy.config import RenderingConfig
from proxy.records import Origin, SessionKind
from proxy.rendering.rendering import Rendering
from proxy.rendering.tokenizer import load_tokenizer
from proxy.store import open_store
from tests.e2e.agents.rewind.player import Player
from tests.e2e.agents.rewind.rewound import Rewinder, State, row
from tests.e2e.agents.rewind.varied import VariedTrial, varied_trial
from tests.e2e.agents.test_agents import AGENTS, PROMPT, example
from tests.e2e.harbor_server import harbor_server
from tests.harbor_sdk.harbor_tasks import write_task
from tests.proxy.checkpoint import write_checkpoint
from tests.proxy.conftest import RunningProxy, starting_proxies

TIMEOUT_S = 900.0
"""Of a trial. A busy machine takes minutes for what takes seconds on an idle one."""
MEASURED = Path(__file__).parent / "measured"
GOOD: dict[str, Any] = {
    "reached": True, "replayed": True, "error": None, "diverged": None, "workspace": None,
    "early_calls": 0, "first_prompt": True, "tolerated": {},
}  # fmt: skip
"""A run to turn k as it should be, without a tolerated difference."""
TERMINUS = "terminus_2"
RETRYING = ("claude_code", "codex", "opencode", "opencode_responses", "opencode_messages")
"""Agents that ask again after an answer that was cut. The others' trials have no faults."""
ABSOLUTE = ("qwen_code", "openhands")
"""Agents whose file tools take absolute paths only: they always run in the same folder."""
NAMES = (
    "claude_code", "codex", "opencode", "opencode_responses", "opencode_messages", "qwen_code",
    "mini_swe_agent", "openhands", TERMINUS,
)  # fmt: skip
_UNSHARE = ("unshare", "-m", "-p", "-f", "--mount-proc", "--kill-child")
"""With process ids of its own, as in the sandbox that trials have by default."""
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
                    server_url=self.harbor_url,
                )
            )
        command = example(agent)
        inner = (*_UNSHARE, "sh", "-c", _IN_PLACE, str(root)) if root else ()
        # Not the user's home: shells of agents would run its profile with each command.
        env = {"PATH": f"{AGENTS / 'bin'}:{os.environ['PATH']}", "HOME": "{directory}"}
        if agent == "qwen_code":  # without it, its commands lose lines of their output
            settings = self.folder / "qwen.json"
            settings.write_text('{"tools": {"shell": {"enableInteractiveShell": false}}}')
            env["QWEN_CODE_SYSTEM_SETTINGS_PATH"] = str(settings)
        env |= command.env
        return CommandLauncher(CommandConfig(argv=("env", *inner, *command.argv), env=env))

    def task(self, agent: str, task_id: str) -> Task:
        if agent != TERMINUS:
            return Task(task_id, {"prompt": PROMPT})
        task = self.folder / "task" / "one"
        if not task.exists():
            limit = round(TIMEOUT_S)
            write_task(task.parent, "one", verify=_PACK, agent_timeout_s=limit)
        return Task(task_id, {"local_task_path": str(task)})


def packed_state(state_dir: Path, rollout: Rollout) -> State:
    """The files of a Harbor trial's `/app`, from the archive that its verifier made."""
    run = json.loads((Path(rollout.logs or "") / RUN_FILE).read_text())
    archive = next(state_dir.rglob(f"*{run['run_id']}*/**/app.tar"), None)
    if archive is None:
        return {}  # the trial failed before its verifier ran
    with tarfile.open(fileobj=BytesIO(archive.read_bytes())) as packed:
        found = {m.name: packed.extractfile(m) for m in packed if m.isfile()}
        return {name: file.read() for name, file in found.items() if file and "/.git/" not in name}


@asynccontextmanager
async def rewinding(
    agent: str, varied: VariedTrial, place: Place, proxy: RunningProxy, trials: Path, task_id: str
) -> AsyncIterator[Rewinder]:
    """Runs the agent in the varied trial through `proxy`. What runs at the same time has the same
    `trials`, so that only the ids of the trials differ, and another `task_id`."""
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
        return await loop.run(place.task(agent, task_id), kind=SessionKind.EVAL, origin=origin)

    state_dir = place.folder / "harbor"
    final = (lambda rollout: packed_state(state_dir, rollout)) if agent == TERMINUS else None
    player = Player(varied, f"{root}/" if root else "", proxy.engine.faults.append)
    try:
        yield Rewinder(proxy, run, trials, player, final, task_id)
    finally:
        await loop.close()


async def measure(
    name: str,
    rewinders: Sequence[Rewinder],
    turns: Callable[[int], list[int]],
    write: Callable[[dict[str, Any]], None],
) -> bool:
    """Records the trial `name` with the first of `rewinders`, and runs it again to `turns(number
    of its turns)`, with all of them at the same time. Writes a row per run; True if all are good.
    """
    recording = await rewinders[0].record()
    rollout = recording.rollout
    if rollout.status is not RolloutStatus.DONE:
        sys.stderr.write(f"{name} FAILED: {rollout.error}\n")
        return False
    count = len(recording.turns)
    left, good = turns(count), True

    async def work(rewinder: Rewinder) -> None:
        nonlocal good
        while left:
            turn = left.pop(0)
            began = time.monotonic()
            rerun = await rewinder.rerun(recording, turn)
            found = row(rerun)
            good = good and good_run(found)
            cpu_s = rerun.branch.rollout.metrics.get("agent_cpu_s", 0.0)
            sys.stderr.write(
                f"{name} to {turn} of {count}: {'ok' if good_run(found) else 'BAD'}, "
                f"{time.monotonic() - began:.1f} s, the agent's CPU {cpu_s:.1f} s\n"
            )
            write({"of": count, **found})

    async with asyncio.TaskGroup() as group:
        for rewinder in rewinders:
            group.create_task(work(rewinder))
    return good


def good_run(found: dict[str, Any]) -> bool:
    """Whether a row is GOOD, except for what was tolerated."""
    return {**found, **GOOD} == {**found, "tolerated": GOOD["tolerated"]}


def line(found: dict[str, Any]) -> str:
    """A row as a line: what differs from GOOD."""
    kept = {name: v for name, v in found.items() if name not in GOOD or v != GOOD[name]}
    return json.dumps(kept, ensure_ascii=False)


def read(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """All rows by agent."""
    return {
        file.stem: [{**GOOD, **json.loads(line)} for line in file.read_text().splitlines()]
        for file in sorted(folder.glob("*.jsonl"))
    }


def rows_of(rows: list[dict[str, Any]], seed: int, trial: int) -> list[dict[str, Any]]:
    return [each for each in rows if (each["seed"], each["trial"]) == (seed, trial)]


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
            f"| {agent} | {len({(each['seed'], each['trial']) for each in found})} | {len(found)} "
            f"| {len(reached)} ({len(reached) / max(1, len(found)):.1%}) "
            f"| {equal} of {len(reached)} | {sum(each['early_calls'] for each in found)} "
            f"| {exact} of {len(reached)} "
            f"| {', '.join(f'{name} {count}' for name, count in kinds.most_common())} |"
        )
    return "\n".join(lines)


async def prove(given: argparse.Namespace) -> None:
    """Runs the trials that are not in `given.out` yet; one after the other for each worker."""
    ends = time.monotonic() + given.seconds
    missing = [(agent, number) for number in range(given.trials) for agent in given.agents]
    with ExitStack() as stack:
        folder = given.work.absolute() / f"{given.seed}-{os.getpid()}"
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
            async with AsyncExitStack() as started:
                store = await open_store(f"sqlite:///{own}/proxy.db")
                started.push_async_callback(store.close)
                start = await started.enter_async_context(
                    starting_proxies(checkpoint, rendering, own)
                )
                limits = {"engine_patience_s": 0}
                proxies = [
                    await start(store=store, max_context_tokens=131_072, limits=limits)
                    for _ in range(given.runs)
                ]
                while missing and time.monotonic() < ends:
                    agent, trial = missing.pop(0)
                    known = rows_of(read(given.out).get(agent, []), given.seed, trial)
                    if known and len(known) >= len(given.turns or range(known[0]["of"])):
                        continue
                    await rewind(agent, trial, proxies, {each["turn"] for each in known})

        async def rewind(
            agent: str, trial: int, proxies: Sequence[RunningProxy], done: set[int]
        ) -> None:
            """Measures the runs of a trial that are not `done`."""
            varied = varied_trial(given.seed, trial, faults=agent in RETRYING)
            trials = folder / f"{agent}-{trial}"

            def lacking(count: int) -> list[int]:
                wanted = given.turns or range(1, count + 1)
                return [turn for turn in wanted if turn <= count and turn not in done]

            def write(found: dict[str, Any]) -> None:
                with (given.out / f"{agent}.jsonl").open("a") as file:
                    file.write(line({"seed": given.seed, "trial": trial, **found}) + "\n")

            async with AsyncExitStack() as opened:
                rewinders = [
                    await opened.enter_async_context(
                        rewinding(agent, varied, place, proxy, trials, f"run{number}")
                    )
                    for number, proxy in enumerate(proxies)
                ]
                good = await measure(f"{agent} {trial}", rewinders, lacking, write)
            if good:
                shutil.rmtree(trials)

        async with asyncio.TaskGroup() as group:
            for number in range(given.jobs):
                group.create_task(work(number))


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.e2e.agents.rewind.proof", description=__doc__
    )
    parser.add_argument("--agents", nargs="+", choices=NAMES, default=list(NAMES))
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--turns", type=int, nargs="+", help="default: each turn of each trial")
    parser.add_argument("--seed", type=int, default=17)
    parser.add_argument("--jobs", type=int, default=1, help="trials at the same time")
    parser.add_argument("--runs", type=int, default=2, help="runs of each trial at the same time")
    parser.add_argument("--seconds", type=float, default=float("inf"),
                        help="begin no trial after these")  # fmt: skip
    parser.add_argument("--out", type=Path, default=MEASURED, help="folder of the lines")
    parser.add_argument("--work", type=Path, default=Path(".cache/rewind-proof"),
                        help="folder of the trials; those of bad runs are kept")  # fmt: skip
    given = parser.parse_args()
    given.work = given.work.resolve()  # as agents see it
    given.out.mkdir(parents=True, exist_ok=True)
    asyncio.run(prove(given))
    rows = read(given.out)
    sys.stdout.write(table(rows) + "\n")
    bad = [each for found in rows.values() for each in found if not each["reached"]]
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
