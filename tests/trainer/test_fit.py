"""The loop: a run that was cut goes on as if it had not been; nothing half-saved is ever used."""

from __future__ import annotations

import asyncio
import json
import resource
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from agent_loop.producers.groups import BatchSettings
from agent_loop.producers.sync import SyncProducer
from agent_loop.records import Group, Rollout, RolloutStatus, Segment, Task
from agent_loop.tasks import Source, TaskStream
from proxy.records import SessionKind
from tests.trainer.fake_engine import fake_engine
from tests.trainer.rollouts import VOCABULARY
from trainer.checkpoint import Checkpoints, Saved
from trainer.cluster.local import local_trainer
from trainer.config import TrainerConfig
from trainer.controller import TrainController
from trainer.errors import CheckpointError, TrainingError
from trainer.fit import Fit
from trainer.policy.learner import Learner
from trainer.policy.probe import score_ids
from trainer.run.assembly import build_models
from trainer.run.control import RunControl
from trainer.run.folder import RunFolder, read_jsonl, truncate_jsonl
from trainer.run.log import RunLog
from trainer.weight_sync.control import EngineControl
from trainer.weight_sync.sync import WeightSync

STEPS = 6
TIMED = ("time", "throughput/", "sync/", "memory/")


class Cut(Exception):
    pass


Score = Callable[[Sequence[int]], Awaitable[list[float]]]


def scored_by(learner: Learner) -> Score:
    async def score(ids: Sequence[int]) -> list[float]:
        return score_ids(learner, ids)

    return score


class ScriptedTrials:
    """Rollouts that are a function of the seed and the policy; `cut_at` ends the run unasked."""

    def __init__(
        self, score: Score, cut_at: int | None, fail: bool = False, reward: float | None = None
    ) -> None:
        self._score = score
        self._left = cut_at
        self._fail = fail
        self._reward = reward

    async def run(
        self, task: Task, *, kind: SessionKind, seed: int = 0, version: int = 0
    ) -> Rollout:
        if self._left is not None:
            self._left -= 1
            if self._left < 0:
                raise Cut
        rng = np.random.default_rng(seed)
        ids = rng.integers(1, VOCABULARY, 12).astype(np.int32)
        mask = np.arange(12) >= 4
        logprobs = np.array([0.0, *await self._score(ids)], np.float32)
        segment = Segment(
            -1,
            ids,
            mask,
            np.where(mask, logprobs, 0).astype(np.float32),
            np.where(mask, version, -1).astype(np.int32),
            np.zeros(12, np.int32),
        )
        status = RolloutStatus.FAILED if self._fail else RolloutStatus.DONE
        reward = self._reward
        if reward is None:
            reward = float(ids[mask].mean() > VOCABULARY / 2)
        return Rollout(f"t-{seed}", task, status, reward, segments=(segment,), num_turns=1)


def config_of(checkpoint: Path, **sections: Any) -> TrainerConfig:
    settings: dict[str, Any] = {
        "model": {"path": checkpoint},
        "remote_agent": {"command": {"argv": ["true"]}},
        "engine": {"verify": False, "verify_tolerance": 1e-3},
        "optimizer": {"lr": 1e-2, "schedule": "linear", "warmup_steps": 2},
        "algorithm": {"mini_batches": 2},
        "trainer": {"steps": STEPS, "device": "cpu", "save_every": 1},
        "logging": {"tensorboard": False, "progress": "none"},
    }
    for name, section in sections.items():
        settings[name] = settings.get(name, {}) | section
    return TrainerConfig.model_validate(settings)


async def run_once(
    config: TrainerConfig, folder: RunFolder, url: str, cut_at: int | None = None, **script: Any
) -> str:
    """What `start` does, on scripted trials: from the last checkpoint, if there is one."""
    checkpoints = Checkpoints(folder.checkpoints, keep_last=config.trainer.keep_last)
    saved = checkpoints.latest()
    truncate_jsonl(folder.metrics, saved.step if saved else 0)
    log = RunLog(config, folder, saved_step=saved.step if saved else 0)
    tasks = [Task(f"task-{number}", {}) for number in range(5)]
    control = RunControl()
    with closing(log):
        async with local_trainer(config, folder, control, ()) as trainer:
            producer = SyncProducer(
                ScriptedTrials(trainer.score, cut_at, **script),
                TaskStream([Source("s", tasks)], seed=1),
                BatchSettings(groups=2, group_size=3),
                seed=config.trainer.seed,
            )
            fit = Fit(config, trainer, producer, None, log, control)
            if state := await trainer.restore():
                fit.produced = state["producer"]
            await trainer.connect([url])
            return await fit.run()


def lines(folder: RunFolder) -> list[dict[str, Any]]:
    return [
        {name: value for name, value in line.items() if not name.startswith(TIMED)}
        for line in read_jsonl(folder.metrics)
    ]


@pytest.fixture(scope="module")
def engine() -> Iterator[str]:
    with fake_engine() as (_, url):
        yield url


@pytest.fixture
def new_folder(tmp_path: Path) -> Any:
    def make(name: str) -> RunFolder:
        folder = RunFolder.create(tmp_path / name)
        folder.config.write_text(yaml.safe_dump({}))
        return folder

    return make


def test_a_run_cut_three_times_equals_one_that_was_not(
    checkpoint: Path, engine: str, new_folder: Any
) -> None:
    config = config_of(checkpoint)
    whole, cut = new_folder("whole"), new_folder("cut")
    assert asyncio.run(run_once(config, whole, engine)) == "done"
    for trials_until_cut in (3, 9, 14):  # in the first step, in the second, in the third after it
        with pytest.raises(ExceptionGroup):
            asyncio.run(run_once(config, cut, engine, trials_until_cut))
    assert asyncio.run(run_once(config, cut, engine)) == "done"
    assert [line["step"] for line in lines(whole)] == list(range(1, STEPS + 1))
    assert lines(cut) == lines(whole)
    weights = [
        load_weights(Checkpoints(f.checkpoints, keep_last=2).latest().path) for f in (whole, cut)
    ]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def load_weights(path: Path) -> dict[str, torch.Tensor]:
    return dict(AutoModelForCausalLM.from_pretrained(path / "model").state_dict())


def test_each_update_reaches_the_engine_with_its_version(checkpoint: Path, new_folder: Any) -> None:
    with fake_engine() as (engine, url):
        asyncio.run(run_once(config_of(checkpoint), new_folder("a"), url))
        assert engine.version == str(STEPS)
        assert engine.calls.count("/update_weights") == STEPS + 1
        calls = engine.calls[-7:]
    assert calls == [
        "/pause",
        "/start_weight_update",
        "/update_weights",
        "/finish_weight_update",
        "/reset_prefix_cache",
        "/weight_info",
        "/resume",
    ]


def test_batches_without_a_signal_change_neither_weights_nor_version(
    checkpoint: Path, new_folder: Any
) -> None:
    config = config_of(checkpoint, algorithm={"groups": "with_signal"}, trainer={"steps": 2})
    folder = new_folder("a")
    with fake_engine() as (engine, url):
        assert asyncio.run(run_once(config, folder, url, reward=1.0)) == "done"
        assert engine.calls.count("/update_weights") == 1
        assert engine.version == "0"
    assert [line["actor/update_steps"] for line in lines(folder)] == [0, 0]
    assert [line["policy_version"] for line in lines(folder)] == [0, 0]


def test_the_export_is_the_policy(checkpoint: Path, engine: str, new_folder: Any) -> None:
    folder, config = new_folder("a"), config_of(checkpoint, trainer={"steps": 1})
    asyncio.run(run_once(config, folder, engine))
    saved = Checkpoints(folder.checkpoints, keep_last=2).latest()
    assert saved is not None
    learner = build_models(config)
    Checkpoints(folder.checkpoints, keep_last=2).load(saved, learner)
    exported = build_models(config_of(saved.path / "model")).policy
    ids = list(range(1, 20))
    assert score_ids(exported, ids) == score_ids(learner.policy, ids)
    assert score_ids(exported, ids) != score_ids(build_models(config).policy, ids)


def test_old_checkpoints_go(checkpoint: Path, engine: str, new_folder: Any) -> None:
    folder = new_folder("a")
    asyncio.run(run_once(config_of(checkpoint, trainer={"keep_last": 2}), folder, engine))
    kept = sorted(path.name for path in folder.checkpoints.iterdir())
    assert kept == [f"step-{STEPS - 1:06d}", f"step-{STEPS:06d}"]


def test_a_full_disk_leaves_the_earlier_checkpoint_whole(checkpoint: Path, tmp_path: Path) -> None:
    learner = build_models(config_of(checkpoint))
    checkpoints = Checkpoints(tmp_path, keep_last=2)

    def save(step: int) -> None:
        checkpoints.save(step, learner, {}, checkpoint)

    save(1)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with pytest.raises(CheckpointError, match="earlier checkpoints are whole"):
            save(2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]
    saved = checkpoints.latest()
    assert saved is not None
    checkpoints.load(saved, build_models(config_of(checkpoint)))


def full_disk_at(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every file that is written to save this step is cut at 4 KiB."""
    save = Checkpoints.save

    def limited(self: Checkpoints, number: int, *args: Any, **options: Any) -> Saved:
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        if number == step:
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
        try:
            return save(self, number, *args, **options)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    monkeypatch.setattr(Checkpoints, "save", limited)


def test_a_run_goes_on_where_a_checkpoint_on_schedule_cannot_be_saved(
    checkpoint: Path,
    engine: str,
    new_folder: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = new_folder("a")
    config = config_of(checkpoint, trainer={"steps": 3}, logging={"progress": "plain"})
    full_disk_at(2, monkeypatch)
    assert asyncio.run(run_once(config, folder, engine)) == "done"
    assert "warning: " in (said := capsys.readouterr().out)
    assert "step-000002: could not be saved" in said
    assert sorted(path.name for path in folder.checkpoints.iterdir()) == [
        "step-000001",
        "step-000003",
    ]


def test_a_last_checkpoint_that_cannot_be_saved_is_an_error(
    checkpoint: Path, engine: str, new_folder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = new_folder("a")
    full_disk_at(3, monkeypatch)
    with pytest.raises(CheckpointError, match="step-000003: could not be saved"):
        asyncio.run(run_once(config_of(checkpoint, trainer={"steps": 3}), folder, engine))
    assert sorted(path.name for path in folder.checkpoints.iterdir()) == [
        "step-000001",
        "step-000002",
    ]


def test_a_half_written_checkpoint_is_not_seen(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / ".step-000007" / "state").mkdir(parents=True)
    assert Checkpoints(tmp_path, keep_last=2).latest() is None


def test_a_checkpoint_of_another_architecture_is_refused(
    checkpoint: Path, engine: str, new_folder: Any, tmp_path: Path
) -> None:
    folder = new_folder("a")
    asyncio.run(run_once(config_of(checkpoint, trainer={"steps": 1}), folder, engine))
    other = tmp_path / "other"
    settings = json.loads((checkpoint / "config.json").read_text()) | {"intermediate_size": 64}
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    type(model)(type(model.config)(**settings)).save_pretrained(other)
    with pytest.raises(CheckpointError, match=r"does not fit model\.path"):
        asyncio.run(run_once(config_of(other), folder, engine))


def test_a_batch_without_a_trainable_rollout_names_why(checkpoint: Path) -> None:
    learner = build_models(config_of(checkpoint))
    trials = ScriptedTrials(scored_by(learner), None, fail=True)
    rollout = asyncio.run(trials.run(Task("a", {}), kind=SessionKind.TRAIN, seed=3))
    rollout.error = "the sandbox is gone"
    with fake_engine() as (_, url):
        sync = WeightSync(EngineControl([url]))
        controller = TrainController(config_of(checkpoint), learner, sync)
        with pytest.raises(TrainingError, match="the sandbox is gone"):
            controller.learn([Group("g", rollout.task, [rollout])])
        sync.close()


def test_engine_log_probabilities_that_are_off_stop_the_run(checkpoint: Path) -> None:
    config = config_of(checkpoint)
    learner = build_models(config)
    trials = ScriptedTrials(scored_by(learner), None)
    rollout = asyncio.run(trials.run(Task("a", {}), kind=SessionKind.TRAIN, seed=3))
    segment = rollout.segments[0]
    segment.logprobs[segment.mask] = np.roll(segment.logprobs[segment.mask], 1)
    with fake_engine() as (_, url):
        sync = WeightSync(EngineControl([url]))
        controller = TrainController(config, learner, sync)
        with pytest.raises(TrainingError, match=r"mean \|Δ log p\|"):
            controller.learn([Group("g", rollout.task, [rollout])])
        sync.close()
