"""A deterministic run without engines: sessions from a random generator, trained and recorded."""

from __future__ import annotations

import asyncio
import sys
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from agent_loop.records import Group, Rollout, RolloutStatus, Task
from agent_loop.trajectory import build_segments
from proxy.records import (
    FinishReason,
    Session,
    SessionKind,
    SessionStatus,
    Turn,
    TurnStatus,
    VersionSpan,
)
from proxy.store import open_store
from tests.trainer.test_fit import config_of
from trainer.checkpoint import Checkpoints
from trainer.cluster.local import local_trainer
from trainer.cluster.rank_zero import Save
from trainer.config import TrainerConfig
from trainer.extras.ledger.ledger import Ledger, read_lines, steps_in
from trainer.fit import TrainOn
from trainer.run.control import RunControl
from trainer.run.folder import RunFolder
from trainer.run.token_log import TokenLog
from trainer.settings.sources import dump

STEPS = 3
GROUPS = 2
SIZE = 3
SAVED = 2
"""The step after which there is a checkpoint."""


@dataclass
class Recorded:
    folder: RunFolder
    config: TrainerConfig
    groups: list[list[Group]]
    """Of each step."""


async def recorded_run(model: Path, path: Path) -> Recorded:
    rng = np.random.default_rng(0)
    config = config_of(
        model,
        engine={"verify": False, "verify_tolerance": 1e9},
        algorithm={"mini_batches": 2, "groups": "with_signal"},
        trainer={"steps": STEPS, "device": "cpu", "deterministic": True},
    )
    folder = RunFolder.create(path)
    folder.config.write_text(dump(config), encoding="utf-8")
    store = await open_store(f"sqlite:///{folder.sessions}")
    batches: list[list[Group]] = []
    tokens = TokenLog(folder.tokens, 1 << 30, print)
    ledger = Ledger(folder, model)
    control = RunControl()
    with closing(ledger), closing(tokens):
        async with local_trainer(config, folder, control, ()) as rank_zero:
            for step in range(1, STEPS + 1):
                groups = []
                for number in range(GROUPS + 1):
                    task = Task(f"task-{step}-{number}", {})
                    rollouts = []
                    for place in range(SIZE):
                        name = f"{task.task_id}-{place}"
                        turns = turns_of(rng, name, step - 1)
                        await store.create_session(session_of(name))
                        for turn in turns:
                            await store.begin_turn(turn)
                            await store.commit_turn(turn)
                        reward = float(place == 0)
                        rollouts.append(rollout_of(task, name, turns, reward))
                    groups.append(Group(f"g{number}", task, tuple(rollouts)))
                ledger.left_out(groups.pop(), "no signal")
                batches.append(groups)
                done = await rank_zero.ask(TrainOn(groups, keep_tokens=True, keep_evidence=True))
                assert done.tokens is not None
                tokens.write(step, done.tokens)
                ledger.write(step, groups, done.evidence)
                if step == SAVED:
                    checkpoints = Checkpoints(folder.checkpoints.absolute(), keep_last=9)
                    await rank_zero.ask(Save(checkpoints, {}, best=False))
    await store.close()
    folder.unlock()
    return Recorded(folder, config, batches)


def turns_of(rng: np.random.Generator, session: str, version: int) -> list[Turn]:
    """Two turns, of which the second extends the first, and a third that its client left."""
    turns: list[Turn] = []
    shared = 0
    for index in range(3):
        prompt, sampled = (rng.integers(5, 400, rng.integers(4, 9)).astype(np.int32) for _ in "ab")
        turns.append(
            Turn(
                session_id=session,
                index=index,
                parent=index - 1 if index else None,
                shared_tokens=shared,
                fork_cause=None,
                prompt_ids=prompt,
                request_key=f"{session}-{index}".encode(),
                sampling={"seed": index},
                sampled_ids=sampled,
                logprobs=-rng.random(len(sampled)).astype(np.float32),
                versions=(VersionSpan(version, 0, len(sampled)),),
                finish_reason=FinishReason.CUT if index == 2 else FinishReason.STOP,
                status=TurnStatus.CUT if index == 2 else TurnStatus.DONE,
            )
        )
        shared += len(prompt) + len(sampled)
    return turns


def rollout_of(task: Task, name: str, turns: list[Turn], reward: float) -> Rollout:
    seed = int.from_bytes(name.encode()[-6:], "little") % 2**31
    segments = build_segments(turns)
    return Rollout(name, task, RolloutStatus.DONE, reward, segments, num_turns=2, seed=seed)


def session_of(name: str) -> Session:
    key = name.encode().ljust(32)
    return Session(name, key, SessionKind.TRAIN, SessionStatus.OPEN, 1.0, 2e9, metadata={})


def hashes(folder: Path) -> list[str]:
    """The weights of each step, by the ledger."""

    return [
        line["policies"][""]["weights"] for line in steps_in(read_lines(folder / "ledger.jsonl"))
    ]


def made(model: Path, path: Path) -> Recorded:
    return asyncio.run(recorded_run(model, path))


if __name__ == "__main__":
    made(*map(Path, sys.argv[1:]))
