"""The columns of trained tokens on disk: complete, in order, and bounded."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.trainer.rollouts import VOCABULARY
from trainer.batch import Batch
from trainer.run.folder import RunFolder
from trainer.run.log import LoggingConfig, RunLog
from trainer.run.token_log import TokenColumns, TokenLog


def a_batch() -> Batch:
    """Two rollouts; the first has two sequences, the later of which holds its earlier turn."""
    count = 5
    return Batch(
        trial_ids=("a", "b"),
        group=torch.tensor([0, 0]),
        rewards=torch.tensor([1.0, 0.0]),
        trial_rewards=torch.tensor([1.0, 0.0]),
        sequences=(np.arange(9), np.arange(6), np.arange(4)),
        sequence_rollout=torch.tensor([0, 0, 1]),
        sequence=torch.tensor([0, 0, 1, 1, 2]),
        position=torch.tensor([7, 8, 4, 5, 3]),
        ids=torch.arange(count) % VOCABULARY,
        turns=torch.tensor([1, 1, 0, 0, 0]),
        logprobs=torch.zeros(count),
        versions=torch.zeros(count, dtype=torch.int64),
        returns=torch.ones(count),
        shares=torch.ones(count),
        prox_logprobs=torch.tensor([-1.0, -2.0, -3.0, -4.0, -5.0]),
        entropies=torch.tensor([0.5, 1.0, 1.5, 2.0, 2.5]),
        advantages=torch.tensor([0.1, 0.2, 0.3, 0.4, -0.5]),
    )


def columns() -> TokenColumns:
    return TokenColumns.of(a_batch(), torch.tensor([0, 2]))


Log = Callable[..., TokenLog]


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def open_log(tmp_path: Path, said: list[str]) -> Log:
    def open_(max_bytes: int = 10**9) -> TokenLog:
        return TokenLog(tmp_path / "tokens", max_bytes, said.append)

    return open_


def kept(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "tokens").iterdir())


def test_tokens_of_a_trial_are_adjacent_and_in_the_order_of_its_turns(
    tmp_path: Path, open_log: Log
) -> None:
    log = open_log()
    log.write(7, columns())
    log.close()
    folder = tmp_path / "tokens/step-000007"
    index = json.loads((folder / "trials.json").read_text())
    assert index == {"trials": ["a", "b"], "starts": [0, 4, 5]}
    read = {path.stem: np.load(path).tolist() for path in folder.glob("*.npy")}
    assert read == {
        "turns": [0, 0, 1, 1, 0],
        "positions": [4, 5, 7, 8, 3],
        "trained": [False, False, True, True, True],
        "advantages": pytest.approx([0.3, 0.4, 0.1, 0.2, -0.5]),
        "logprobs": [-3.0, -4.0, -1.0, -2.0, -5.0],
        "entropies": [1.5, 2.0, 0.5, 1.0, 2.5],
    }


def test_oldest_steps_are_removed_above_the_limit(tmp_path: Path, open_log: Log) -> None:
    log = open_log()
    log.write(1, columns())
    log.close()
    size = sum(file.stat().st_size for file in (tmp_path / "tokens/step-000001").iterdir())
    log = open_log(max_bytes=2 * size)
    for step in (2, 3, 4):
        log.write(step, columns())
    log.close()
    assert kept(tmp_path) == ["step-000003", "step-000004"]


def test_step_that_somebody_else_removed_does_not_stop_the_removal(
    tmp_path: Path, open_log: Log, said: list[str]
) -> None:
    log = open_log()
    log.write(1, columns())
    log.close()
    size = sum(file.stat().st_size for file in (tmp_path / "tokens/step-000001").iterdir())
    log = open_log(max_bytes=2 * size)
    shutil.rmtree(tmp_path / "tokens/step-000001")
    for step in (2, 3, 4):
        log.write(step, columns())
    log.close()
    assert kept(tmp_path) == ["step-000003", "step-000004"]
    assert not said


@pytest.mark.parametrize("token_bytes", [0, 10**9])
def test_continued_run_removes_the_steps_that_it_repeats_and_nothing_else(
    tmp_path: Path, open_log: Log, token_bytes: int
) -> None:
    log = open_log()
    for step in (1, 2, 3):
        log.write(step, columns())
    log.close()
    tokens = tmp_path / "tokens"
    for left in (".step-000002", ".step-000004", "of mine"):
        (tokens / left).mkdir()
    for mine in ("notes.txt", "step-000001.zip", "step-000009"):
        (tokens / mine).write_text("text")
    config = LoggingConfig(tensorboard=False, progress="none", token_bytes=token_bytes)
    RunLog(config, RunFolder(tmp_path), steps=4, saved_step=2).close()
    steps = ["step-000001", "step-000001.zip", "step-000002", "step-000009"]
    assert kept(tmp_path) == ["notes.txt", "of mine", *steps]


def test_full_disk_is_a_warning_and_not_the_end_of_the_run(
    tmp_path: Path, open_log: Log, said: list[str]
) -> None:
    log = open_log()
    (tmp_path / "tokens").rmdir()
    log.write(1, columns())
    log.close()
    assert "tokens of a step could not be written" in said[0]
