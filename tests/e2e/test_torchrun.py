"""`torchrun … -m trainer.cli` gives the same training as one process, and stops as a whole."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.e2e.steady_agent import TURNS
from tests.e2e.test_train_process import (
    STEPS,
    TRIALS_PER_STEP,
    Train,
    assert_equal,
    configure,
    engine,
    steps,
    summary,
    train,
)
from tests.processes import assert_all_end, descendants
from trainer.checkpoint import Checkpoints

__all__ = ["engine"]
pytestmark = pytest.mark.engine

# SGD-like: a large epsilon, as Adam would turn rounding noise in tiny gradients into steps.
SMOOTH = "optimizer.eps=1e-2"


ONE_MACHINE = ("--nproc-per-node", "2")


def torchrun(folder: Path, options: Sequence[str], *words: str, log: str = "said.log") -> Train:
    arguments = ["--config", str(folder / "config.yaml"), SMOOTH, "trainer.ranks=2", *words]
    words = (*options, "-m", "trainer.cli", *arguments)
    return Train("torch.distributed.run", words, folder / "words", folder / log, anew=True)


def saved_step(folder: Path) -> int:
    saved = Checkpoints(folder / "run" / "checkpoints", keep_last=2).latest()
    return 0 if saved is None else saved.step


def weights(folder: Path) -> dict[str, torch.Tensor]:
    saved = Checkpoints(folder / "run" / "checkpoints", keep_last=2).latest()
    assert saved is not None
    return dict(AutoModelForCausalLM.from_pretrained(saved.path / "model").state_dict())


def test_two_ranks_of_torchrun_train_as_one_process(
    engine: str, tiny_model: Path, tmp_path: Path
) -> None:
    alone, both = tmp_path / "alone", tmp_path / "both"
    for folder in (alone, both):
        folder.mkdir()
        configure(folder, tiny_model, {"urls": [engine]})
    with train(alone, "--config", str(alone / "config.yaml"), SMOOTH) as run:
        assert run.wait() == 0, run.said
    # Started as on two machines with one rank each, which meet at a port that nobody else can take.
    store = torch.distributed.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", 0, is_master=True, wait_for_workers=False
    )
    meeting = f"127.0.0.1:{store.port}"
    options = ("--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", meeting)
    with torchrun(both, options, log="0.log") as one, torchrun(both, options, log="1.log") as two:
        assert (one.wait(), two.wait()) == (0, 0), one.said + two.said
    assert_equal(steps(both), steps(alone))
    assert saved_step(both) == saved_step(alone) == STEPS
    expected = weights(alone)
    for name, weight in weights(both).items():
        torch.testing.assert_close(weight, expected[name], atol=1e-4, rtol=1e-3, msg=name)


@pytest.mark.long
def test_signal_to_torchrun_saves_and_ends_every_rank(
    engine: str, tiny_model: Path, tmp_path: Path
) -> None:
    configure(tmp_path, tiny_model, {"urls": [engine]})
    with torchrun(tmp_path, ONE_MACHINE, "trainer.save_every=0") as run:
        for _ in range(TRIALS_PER_STEP * TURNS + 1):  # into the second step
            run.word()
        watched = run.watch()
        os.kill(run.process.pid, signal.SIGTERM)
        assert run.wait() != 0
        assert_all_end(watched)
    assert summary(tmp_path)["status"] == "stopped", run.said
    assert saved_step(tmp_path) == 1


@pytest.mark.long
def test_the_same_command_continues_a_killed_run_of_torchrun(
    engine: str, tiny_model: Path, tmp_path: Path
) -> None:
    configure(tmp_path, tiny_model, {"urls": [engine]})
    with torchrun(tmp_path, ONE_MACHINE) as run:
        for _ in range(2 * TRIALS_PER_STEP * TURNS + 1):  # into the third step
            run.word()
        watched = run.watch()
        for pid in [*descendants(run.process.pid), run.process.pid]:
            with contextlib.suppress(ProcessLookupError):  # ended with its parent
                os.kill(pid, signal.SIGKILL)
        assert_all_end(watched)
    with torchrun(tmp_path, ONE_MACHINE) as run:
        assert run.wait() == 0, run.said
    assert "continuing from" in run.said
    assert not (tmp_path / "run-2").exists()
    assert [line["step"] for line in steps(tmp_path)] == list(range(1, STEPS + 1))
