"""A swarm client without a GPU: runs the quickstart's agent, unchanged, and reports its rewards.

    python -m examples.swarm.client URL --tasks examples/quickstart/train.jsonl --threads 4

It ends when the training is done. Any number of clients may run, on any machine, each with its own
tasks (`--share 1/2` and `--share 2/2`, for example). The first client starts the engine. The token
is AGENTIC_SWARM_TOKEN or, on the server's machine, the one in `runs/swarm/token`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from threading import Lock
from typing import Any

from agent_loop.extras.swarm import Claimed, EngineState, SwarmClient, SwarmError

_QUICKSTART = Path(__file__).parents[1] / "quickstart"
Task = dict[str, Any]


def main() -> int:
    arguments = _parser().parse_args()
    with SwarmClient(arguments.url) as swarm:
        config = arguments.config.read_text(encoding="utf-8")
        status = swarm.auto_start(config)
        print(f"{swarm.client_id}: engine {status.state.value}, version {status.version}")
        episodes = _episodes(_tasks(arguments.tasks, arguments.share), arguments.group_size)
        with ThreadPoolExecutor(arguments.threads) as pool:
            workers = [
                pool.submit(_work, swarm, config, episodes) for _ in range(arguments.threads)
            ]
            rewards = [reward for worker in workers for reward in worker.result()]
        status = swarm.status()
    print(f"{len(rewards)} episodes, mean reward {sum(rewards) / max(1, len(rewards)):.3f}")
    print(f"engine {status.state.value}: {status.detail}")
    return 0 if status.state is EngineState.DONE else 1


def _work(swarm: SwarmClient, config: str, episodes: Iterator[Task]) -> list[float]:
    """Plays one episode after another until the engine has ended. Resumes the run of a server that
    was killed."""
    rewards = []
    while True:
        task = next(episodes)
        try:
            with swarm.episode(task_id=task["task_id"]) as episode:
                reward = run_agent(task, episode)
                swarm.end_episode(episode, reward=reward)
                rewards.append(reward)
        except SwarmError as error:
            state = swarm.status().state
            if state is EngineState.INTERRUPTED:
                swarm.auto_start(config)
            elif not state.has_engine:
                return rewards
            print(f"{task['task_id']}: {error.message}", file=sys.stderr)


def run_agent(task: Task, episode: Claimed) -> float:
    """Runs the agent and its verifier, two programs that know only their environment."""
    with tempfile.TemporaryDirectory() as folder:
        task_file = Path(folder) / "task.json"
        task_file.write_text(json.dumps(task), encoding="utf-8")
        env = {
            **os.environ,
            "OPENAI_BASE_URL": episode.base_url,
            "OPENAI_API_KEY": episode.api_key,
            "AGENT_MODEL": "policy",
            "TASK_FILE": str(task_file),
        }
        for program in ("agent.py", "verify.py"):
            done = subprocess.run(
                [sys.executable, _QUICKSTART / program],
                cwd=folder,
                env=env,
                stdout=subprocess.DEVNULL,
                check=False,
            )
    return 1.0 if done.returncode == 0 else 0.0


class _Shared:
    """An iterator that threads can share."""

    def __init__(self, items: Iterator[Task]) -> None:
        self._items, self._lock = items, Lock()

    def __iter__(self) -> _Shared:
        return self

    def __next__(self) -> Task:
        with self._lock:
            return next(self._items)


def _episodes(tasks: list[Task], group_size: int) -> Iterator[Task]:
    """Repeats each task `group_size` times in a row, and the whole list without end. Episodes of
    a group share a task id; each pass over the list has new task ids, and so new groups."""

    def forever() -> Iterator[Task]:
        for turn in count():
            for task in tasks:
                for _ in range(group_size):
                    yield {**task, "task_id": f"{task['task_id']}.{turn}"}

    return _Shared(forever())


def _tasks(path: Path, share: str) -> list[Task]:
    part, parts = map(int, share.split("/"))
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()][
        part - 1 :: parts
    ]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("url")
    parser.add_argument("--tasks", type=Path, default=_QUICKSTART / "train.jsonl")
    parser.add_argument("--share", default="1/1", help="the part of the tasks to play, like 1/2")
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--group-size", type=int, default=8, help="the value of rollout.group_size")
    parser.add_argument(
        "--config", type=Path, default=Path(__file__).with_name("agentic_trainer.yaml")
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
