"""Two ranks in the loop of the mains: they train like one rank, and leave no process behind."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from proxy.run_files.files import read_jsonl
from tests.trainer.fake_engine import fake_engine
from tests.trainer.score_text import ScoreText
from tests.trainer.test_fit import config_of, run_once
from trainer.checkpoint import Checkpoints
from trainer.cluster.local import local_trainer
from trainer.cluster.ranks import check_seat, torchrun_seat
from trainer.config import TrainerConfig
from trainer.errors import ConfigError, TrainerError
from trainer.run.control import RunControl
from trainer.run.folder import RunFolder
from trainer.settings.sources import dump

pytestmark = pytest.mark.slow

COMPARED = ("actor/loss", "actor/grad_norm", "actor/entropy", "reward/mean", "actor/lr")
STEPS = 4


def config(checkpoint: Path, folder: RunFolder, ranks: int, **trainer: Any) -> TrainerConfig:
    # SGD-like: a large epsilon, as Adam would turn rounding noise in tiny gradients into steps
    made = config_of(
        checkpoint,
        model={"max_micro_batch_tokens": 24},
        optimizer={"lr": 1e-2, "eps": 1e-2, "schedule": "constant"},
        algorithm={"preset": "ppo", "mini_batches": 2},
        trainer={"steps": STEPS, "ranks": ranks} | trainer,
    )
    folder.config.write_text(dump(made))
    return made


def run(checkpoint: Path, folder: RunFolder, url: str, ranks: int, **trainer: Any) -> None:
    assert (
        asyncio.run(run_once(config(checkpoint, folder, ranks, **trainer), folder, url)) == "done"
    )


def metrics(folder: RunFolder) -> list[list[float]]:
    return [[line[name] for name in COMPARED] for line in read_jsonl(folder.metrics)]


def weights(folder: RunFolder) -> dict[str, torch.Tensor]:
    saved = Checkpoints(folder.checkpoints, keep_last=2).latest()
    assert saved is not None
    assert saved.step == STEPS
    return dict(AutoModelForCausalLM.from_pretrained(saved.path / "model").state_dict())


def test_two_ranks_train_like_one_even_after_a_resume_with_another_number_of_ranks(
    checkpoint: Path, tmp_path: Path
) -> None:
    """In the last step, both ranks compute each micro-batch together."""
    one, two = (RunFolder.create(tmp_path / name) for name in ("one", "two"))
    with fake_engine() as (engine, url):
        run(checkpoint, one, url, ranks=1)
        for steps, ranks, together in ((1, 2, 1), (2, 1, 1), (STEPS, 2, 2)):
            run(checkpoint, two, url, ranks=ranks, steps=steps, context_parallel=together)
        assert engine.version == str(STEPS)
    assert len(metrics(one)) == STEPS
    for ours, theirs in zip(metrics(two), metrics(one), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-3, abs=1e-4)
    expected = weights(one)
    for name, weight in weights(two).items():
        torch.testing.assert_close(weight, expected[name], atol=1e-4, rtol=1e-3, msg=name)


def rank_process() -> int:
    """The process id of a rank other than 0, of a run in this process or a descendant."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if b"trainer.cluster.follower" not in words or b"-S" in words:
                continue  # the guard's command line contains the same words
            if os.getpid() in ancestors(int(entry.name)):
                return int(entry.name)
    raise AssertionError("there is no other rank")


def ancestors(pid: int) -> Iterator[int]:
    while pid > 1:
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        yield pid


def test_killed_rank_ends_the_run_with_a_clear_message(checkpoint: Path, tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "a")

    async def lose_a_rank() -> None:
        control = RunControl()
        async with local_trainer(config(checkpoint, folder, 2), folder, control, ()) as rank_zero:
            await rank_zero.ask(ScoreText([1, 2, 3]))
            os.kill(rank_process(), signal.SIGKILL)
            await control.finish(rank_zero.ask(ScoreText([1, 2, 3])))

    with pytest.raises(
        TrainerError, match=r"rank 1 of the trainer ended with code 137.*start the run"
    ):
        asyncio.run(lose_a_rank())


def test_rank_that_does_not_start_is_an_error_with_the_reason(
    checkpoint: Path, tmp_path: Path
) -> None:
    folder = RunFolder.create(tmp_path / "a")
    settings = config(checkpoint, folder, 2)
    wrong = settings.optimizer.model_copy(
        update={"lr": -1.0}
    )  # only rank 1 reads it before joining
    settings = settings.model_copy(update={"optimizer": wrong})

    async def start() -> None:
        async with local_trainer(settings, folder, RunControl(), ()):
            pass

    with pytest.raises(
        TrainerError, match=r"rank 1 of the trainer ended with code 1: .*log: .*rank-1\.log"
    ):
        asyncio.run(start())


def test_every_rank_ends_when_the_run_is_killed(checkpoint: Path, tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "a")
    config(checkpoint, folder, 2)
    program = f"""
    import asyncio, pathlib
    from trainer.cluster.local import local_trainer
    from tests.trainer.score_text import ScoreText
    from trainer.settings.sources import load
    from trainer.run.control import RunControl
    from trainer.run.folder import RunFolder
    folder = RunFolder(pathlib.Path({str(folder.path)!r}))
    async def main():
        async with local_trainer(load([folder.config]), folder, RunControl(), ()) as rank_zero:
            await rank_zero.ask(ScoreText([1, 2, 3]))
            print("scored", flush=True)
            await asyncio.Event().wait()
    asyncio.run(main())
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE
    ) as driver:
        assert driver.stdout is not None
        assert driver.stdout.readline() == b"scored\n"
        other = os.pidfd_open(rank_process())
        driver.kill()
    poll = select.poll()
    poll.register(other)
    assert poll.poll(30_000), "the other rank is still there"
    os.close(other)


def test_engines_sleep_while_the_trainer_trains(checkpoint: Path, tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "a")
    settings = config_of(
        checkpoint,
        engine={"sleep": True, "verify": False, "verify_tolerance": 1e-3},
        trainer={"steps": 1},
    )
    with fake_engine() as (engine, url):
        asyncio.run(run_once(settings, folder, url))
    calls = [call for call in engine.calls if call in ("/sleep", "/wake_up", "/update_weights")]
    update = ["/sleep", "/update_weights", "/wake_up"]  # at level 0, which only pauses
    assert calls == [*update, "/sleep", "/wake_up", *update]


def test_seat_is_read_from_torchruns_environment(checkpoint: Path, tmp_path: Path) -> None:
    started = {"TORCHELASTIC_RUN_ID": "none", "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}
    seat = torchrun_seat(started)
    assert seat is not None
    assert (seat.rank, seat.size, seat.local_rank) == (3, 4, 1)
    assert torchrun_seat({"RANK": "3", "WORLD_SIZE": "4"}) is None
    with pytest.raises(ConfigError, match=r"trainer\.ranks=2: torchrun has started 4"):
        check_seat(config(checkpoint, RunFolder.create(tmp_path / "a"), 2), seat)
