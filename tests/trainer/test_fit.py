"""The training loop: an interrupted run continues as if it had not been interrupted, and an
incomplete checkpoint is never used."""

from __future__ import annotations

import asyncio
import base64
import json
import math
import resource
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from agent_loop.agents import Agents
from agent_loop.evaluator import EvalReport, Score
from agent_loop.producers.rollout_config import RolloutConfig
from agent_loop.producers.sync import SyncProducer
from agent_loop.records import Group, Rollout, RolloutStatus, Segment, Task
from agent_loop.tasks import Source, TaskStream
from proxy.records import Origin, SessionKind
from proxy.run_files.files import read_jsonl, truncate_jsonl
from tests.trainer.fake_engine import fake_engine
from tests.trainer.rollouts import VOCABULARY
from tests.trainer.score_text import ScoreText
from trainer.batch import Batch
from trainer.checkpoint import Checkpoints, Saved, random_state, restore_random_state
from trainer.cluster.engines import RunEngines
from trainer.cluster.local import local_trainer
from trainer.cluster.rank_models import models_of_rank
from trainer.cluster.rank_zero import RankZero, Restore
from trainer.config import TrainerConfig
from trainer.errors import CheckpointError, TrainingError
from trainer.fit import Evaluates, Fit, TrainOn
from trainer.learning import steps
from trainer.learning.learner import Learner
from trainer.learning.models import Models
from trainer.learning.policies import Learners
from trainer.policy.policy import Policy
from trainer.policy.scores import Scores
from trainer.run.control import RunControl, StopRequested
from trainer.run.folder import RunFolder
from trainer.run.log import RunLog

STEPS = 6
TIMED = ("time", "throughput/", "sync/", "memory/")


class Cut(Exception):
    pass


Scorer = Callable[[Sequence[int]], Awaitable[list[float]]]


def scored_by(learner: Learner) -> Scorer:
    async def score(ids: Sequence[int]) -> list[float]:
        return learner.score(ids)

    return score


def scored_on(rank_zero: RankZero) -> Scorer:
    async def score(ids: Sequence[int]) -> list[float]:
        return await rank_zero.ask(ScoreText(ids))

    return score


class ScriptedTrials:
    """Rollouts that are a function of the seed and the policy; `cut_at` interrupts the run."""

    def __init__(
        self, score: Scorer, cut_at: int | None, fail: bool = False, reward: float | None = None
    ) -> None:
        self._score = score
        self._left = cut_at
        self._fail = fail
        self._reward = reward

    async def run(
        self,
        task: Task,
        *,
        kind: SessionKind,
        seed: int = 0,
        version: int = 0,
        origin: Origin | None = None,
    ) -> Rollout:
        if self._left is not None:
            self._left -= 1
            if self._left < 0:
                raise Cut
        rng = np.random.default_rng(seed)
        ids = rng.integers(1, VOCABULARY, 12).astype(np.int32)
        mask = np.arange(12) >= 4
        logprobs = np.array([0.0, *await self._score(ids.tolist())], np.float32)
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
        **({} if "agents" in sections else {"remote_agent": {"command": {"argv": ["true"]}}}),
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
    config: TrainerConfig,
    folder: RunFolder,
    url: str,
    cut_at: int | None = None,
    evaluator: Evaluates | None = None,
    stream: TaskStream | None = None,
    **script: Any,
) -> str:
    """Does the same as `start` with scripted trials: continues from the last checkpoint, if there
    is one."""
    checkpoints = Checkpoints(folder.checkpoints, keep_last=config.trainer.keep_last)
    saved = checkpoints.latest()
    truncate_jsonl(folder.metrics, saved.step if saved else 0)
    log = RunLog(
        config.logging,
        folder,
        steps=config.trainer.steps,
        saved_step=saved.step if saved else 0,
    )
    tasks = [Task(f"task-{number}", {}) for number in range(5)]
    control = RunControl()
    with closing(log):
        async with local_trainer(config, folder, control, ()) as rank_zero:
            producer = SyncProducer(
                ScriptedTrials(scored_on(rank_zero), cut_at, **script),
                stream or TaskStream([Source("s", tasks)], seed=1),
                RolloutConfig(groups_per_step=2, group_size=3),
                seed=config.trainer.seed,
            )
            engines = RunEngines(rank_zero, given_urls=[url])
            fit = Fit(
                config.trainer,
                config.eval,
                rank_zero,
                engines,
                producer,
                evaluator,
                checkpoints,
                log,
                control,
            )
            fit.resume_from(await rank_zero.ask(Restore(checkpoints)))
            await engines.connect()
            return await fit.run()


def learner_of(config: TrainerConfig) -> Learner:
    return Learner(config, models_of_rank(config))


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


def test_run_that_is_interrupted_three_times_equals_an_uninterrupted_run(
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


def test_interrupted_run_of_two_agents_continues_with_the_same_agents(
    checkpoint: Path, engine: str, new_folder: Any, tmp_path: Path
) -> None:
    tasks = tmp_path / "tasks.jsonl"
    named = {"task_id": "named", "agent": "shell"}
    tasks.write_text("".join(json.dumps(t) + "\n" for t in (named, {"task_id": "any"})))
    command = {"command": {"argv": ["agent"]}}
    data = {"train_files": [str(tasks)]}
    own = command | {"data": data, "weight": 2}
    sections = {"agents": {"shop": command, "shell": command, "own": own}, "data": data}
    config = config_of(checkpoint, **sections)

    def stream() -> TaskStream:
        return Agents(config.agents, config.data).training_tasks()

    whole, cut = new_folder("whole"), new_folder("cut")
    assert asyncio.run(run_once(config, whole, engine, stream=stream())) == "done"
    with pytest.raises(ExceptionGroup):
        asyncio.run(run_once(config, cut, engine, 9, stream=stream()))
    assert asyncio.run(run_once(config, cut, engine, stream=stream())) == "done"
    assert lines(cut) == lines(whole)
    agents = [[line["agent"] for line in read_jsonl(f.trials_log)] for f in (whole, cut)]
    assert agents[0] == agents[1]
    assert set(agents[0]) == {"shop", "shell", "own"}
    assert sum(line.get("agent/own/trials", 0) for line in lines(whole)) == agents[0].count("own")


def load_weights(path: Path) -> dict[str, torch.Tensor]:
    return dict(AutoModelForCausalLM.from_pretrained(path / "model").state_dict())


def test_each_update_reaches_the_engine_with_its_version(checkpoint: Path, new_folder: Any) -> None:
    with fake_engine() as (engine, url):
        asyncio.run(run_once(config_of(checkpoint), new_folder("a"), url))
        assert engine.version == str(STEPS)
        assert engine.calls.count("/update_weights") == STEPS + 1
        calls = engine.calls[-8:]
    assert calls == [
        "/init_weight_transfer_engine",  # stages the weights
        "/sleep",
        "/reset_prefix_cache",
        "/start_weight_update",
        "/update_weights",
        "/finish_weight_update",
        "/weight_info",
        "/wake_up",
    ]


def test_batch_without_a_signal_changes_neither_weights_nor_version(
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


def test_run_ends_after_the_step_that_exceeds_max_wall_s(
    checkpoint: Path, engine: str, new_folder: Any
) -> None:
    folder = new_folder("a")
    config = config_of(checkpoint, trainer={"max_wall_s": 1e-6})
    assert asyncio.run(run_once(config, folder, engine)) == "done"
    assert lines(folder) == []


def test_run_without_a_signal_reports_it_saves_and_ends(
    checkpoint: Path, engine: str, new_folder: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = new_folder("a")
    config = config_of(
        checkpoint,
        trainer={"no_signal_steps": 2, "save_every": 0},
        logging={"progress": "plain"},
    )
    why = r"2 steps in a row without a signal \(trainer\.no_signal_steps=2\)"
    with pytest.raises(TrainingError, match=why):
        asyncio.run(run_once(config, folder, engine, reward=1.0))
    assert capsys.readouterr().out.count("no signal: all advantages are 0") == 2
    assert [line["signal/steps_without"] for line in lines(folder)] == [1, 2]
    saved = Checkpoints(folder.checkpoints, keep_last=2).latest()
    assert saved is not None
    assert saved.step == 2


def test_checkpoints_are_written_by_time(checkpoint: Path, engine: str, new_folder: Any) -> None:
    folder = new_folder("a")
    settings = {"save_every": 0, "save_every_s": 1e-6, "keep_last": STEPS}
    asyncio.run(run_once(config_of(checkpoint, trainer=settings), folder, engine))
    assert len(list(folder.checkpoints.glob("step-*"))) == STEPS


class ScriptedEvaluator:
    """An evaluator with scripted success rates, one for each evaluation; NaN: its trial failed."""

    def __init__(self, *rates: float) -> None:
        self._rates = list(rates)

    trials = 1

    async def evaluate(self, version: int) -> EvalReport:
        success = self._rates.pop(0)
        judged = 0 if math.isnan(success) else 1
        score = Score(success, (0.0, 1.0), success, {1: success}, judged, judged, 1 - judged, 1.0)
        return EvalReport(version, score, {}, [])


def test_run_stops_at_success_and_saves_that_step_as_the_best(
    checkpoint: Path, engine: str, new_folder: Any
) -> None:
    folder = new_folder("a")
    config = config_of(
        checkpoint,
        trainer={"save_every": 0, "stop_at_success": 0.5},
        eval={"every": 1, "before": False, "after": False},
    )
    evaluator = ScriptedEvaluator(0.3, 0.2, 0.6)
    assert asyncio.run(run_once(config, folder, engine, evaluator=evaluator)) == "done"
    assert [line["step"] for line in lines(folder) if "reward/mean" in line] == [1, 2, 3]
    assert (folder.checkpoints / "best").read_text() == "step-000003"


def test_evaluation_without_a_judged_trial_is_neither_the_goal_nor_the_best(
    checkpoint: Path, engine: str, new_folder: Any
) -> None:
    folder = new_folder("a")
    config = config_of(
        checkpoint,
        trainer={"steps": 3, "save_every": 0, "stop_at_success": 0.9},
        eval={"every": 1, "before": False, "after": False},
    )
    evaluator = ScriptedEvaluator(math.nan, 0.3, 0.2)
    assert asyncio.run(run_once(config, folder, engine, evaluator=evaluator)) == "done"
    assert [line["step"] for line in lines(folder) if "reward/mean" in line] == [1, 2, 3]
    assert (folder.checkpoints / "best").read_text() == "step-000002"


def test_repeated_and_added_steps_are_evaluated_again(
    checkpoint: Path, engine: str, new_folder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = new_folder("a")

    def evaluated(steps: int, *rates: float) -> list[tuple[str, float]]:
        config = config_of(checkpoint, trainer={"steps": steps, "save_every": 0})
        asyncio.run(run_once(config, folder, engine, evaluator=ScriptedEvaluator(*rates)))
        return [(name, each["success"]) for name, each in folder.read_summary()["eval"].items()]

    def killed(*_: Any, **__: Any) -> None:
        raise Cut

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, "save", killed)  # after the last evaluation
        with pytest.raises(Cut):
            evaluated(1, 0.1, 0.2)
    assert evaluated(1, 0.3) == [("before", 0.1), ("after", 0.3)]
    assert evaluated(1) == [("before", 0.1), ("after", 0.3)]
    assert evaluated(2, 0.4) == [("before", 0.1), ("after", 0.4)]


class StoppedEvaluator(ScriptedEvaluator):
    async def evaluate(self, version: int) -> EvalReport:
        raise StopRequested


def stop_in_an_evaluation_and_continue(
    config: TrainerConfig, folder: RunFolder, engine: str, *rates: float
) -> None:
    assert asyncio.run(run_once(config, folder, engine, evaluator=StoppedEvaluator())) == "stopped"
    evaluator = ScriptedEvaluator(*rates)
    assert asyncio.run(run_once(config, folder, engine, evaluator=evaluator)) == "done"


def test_evaluation_in_which_a_run_was_stopped_is_made_when_it_continues(
    checkpoint: Path, engine: str, new_folder: Any
) -> None:
    folder = new_folder("a")
    evals = {"every": 1, "before": False, "after": False}
    config = config_of(checkpoint, trainer={"steps": 3, "stop_at_success": 0.5}, eval=evals)
    stop_in_an_evaluation_and_continue(config, folder, engine, 0.3, 0.6)
    made = folder.read_summary()["eval"]
    assert {name: each["success"] for name, each in made.items()} == {"1": 0.3, "2": 0.6}


def test_checkpoint_is_the_best_by_an_evaluation_that_is_made_when_the_run_continues(
    checkpoint: Path, engine: str, new_folder: Any
) -> None:
    folder = new_folder("a")
    evals = {"every": 1, "before": False, "after": False}
    config = config_of(checkpoint, trainer={"steps": 2, "keep_last": 1}, eval=evals)
    stop_in_an_evaluation_and_continue(config, folder, engine, 0.6, 0.2)
    assert (folder.checkpoints / "best").read_text() == "step-000001"
    assert (folder.checkpoints / "step-000001").is_dir()


def test_producer_is_paused_during_an_evaluation_even_if_it_fails(
    checkpoint: Path, engine: str, new_folder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    monkeypatch.setattr(SyncProducer, "pause", lambda _: calls.append("pause"))
    monkeypatch.setattr(SyncProducer, "resume", lambda _: calls.append("resume"))

    class Failing(ScriptedEvaluator):
        async def evaluate(self, version: int) -> EvalReport:
            calls.append(f"evaluate {version}")
            if version:
                raise Cut
            return await super().evaluate(version)

    config = config_of(checkpoint, eval={"every": 1, "before": True, "after": False})
    with pytest.raises(Cut):
        asyncio.run(run_once(config, new_folder("a"), engine, evaluator=Failing(0.5)))
    assert calls == ["pause", "evaluate 0", "resume", "pause", "evaluate 1", "resume"]


def test_exported_checkpoint_equals_the_policy(
    checkpoint: Path, engine: str, new_folder: Any
) -> None:
    folder, config = new_folder("a"), config_of(checkpoint, trainer={"steps": 1})
    asyncio.run(run_once(config, folder, engine))
    saved = Checkpoints(folder.checkpoints, keep_last=2).latest()
    assert saved is not None
    trained, exported = learner_of(config), learner_of(config_of(saved.path / "model"))
    trained.restore(Checkpoints(folder.checkpoints, keep_last=2))
    ids = list(range(1, 20))
    assert exported.score(ids) == trained.score(ids)
    assert exported.score(ids) != learner_of(config).score(ids)


def test_old_checkpoints_are_deleted(checkpoint: Path, engine: str, new_folder: Any) -> None:
    folder = new_folder("a")
    asyncio.run(run_once(config_of(checkpoint, trainer={"keep_last": 2}), folder, engine))
    kept = sorted(path.name for path in folder.checkpoints.iterdir())
    assert kept == [f"step-{STEPS - 1:06d}", f"step-{STEPS:06d}"]


def test_full_disk_does_not_damage_earlier_checkpoints(checkpoint: Path, tmp_path: Path) -> None:
    models = models_of_rank(config_of(checkpoint))
    checkpoints = Checkpoints(tmp_path, keep_last=2)

    def save(step: int) -> None:
        checkpoints.save(step, models, {}, checkpoint)

    save(1)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with pytest.raises(CheckpointError, match="earlier checkpoints are unchanged"):
            save(2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]
    saved = checkpoints.latest()
    assert saved is not None
    checkpoints.load(saved, models_of_rank(config_of(checkpoint)))


def test_disk_that_is_full_at_the_end_of_a_save_keeps_the_best_checkpoint(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = models_of_rank(config_of(checkpoint))
    checkpoints = Checkpoints(tmp_path, keep_last=1)
    checkpoints.save(1, models, {}, checkpoint, best=True)
    opened = Path.open

    def full(path: Path, mode: str = "r", *args: Any, **options: Any) -> Any:
        if "best" in path.name and mode == "w":
            opened(path, mode).close()
            path = Path("/dev/full")
        return opened(path, mode, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", full)
        with pytest.raises(CheckpointError, match="No space left"):
            checkpoints.save(2, models, {}, checkpoint, best=True)
    checkpoints.save(3, models, {}, checkpoint)
    assert (tmp_path / "best").read_text() == "step-000001"
    assert (tmp_path / "step-000001").is_dir()


def full_disk_at(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits the size of every file that is written to save this step to 4 KiB."""
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


def test_run_continues_if_a_scheduled_checkpoint_cannot_be_saved(
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


def test_last_checkpoint_that_cannot_be_saved_is_an_error(
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


def test_run_continues_on_a_machine_with_fewer_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    state, restored = random_state() | {"cuda": ["AAAA", "BBBB"]}, dict[int, bytes]()

    def set_state(state: torch.Tensor, device: int) -> None:
        (None,)[device]  # one GPU, as torch's own `default_generators`
        restored[device] = bytes(state.tolist())

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda.random, "set_rng_state", set_state)
    restore_random_state(state)
    assert restored == {0: base64.b64decode("AAAA")}


def test_incomplete_checkpoint_is_ignored(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / ".step-000007" / "state").mkdir(parents=True)
    assert Checkpoints(tmp_path, keep_last=2).latest() is None


def test_save_deletes_what_a_killed_process_left_of_another_step(
    checkpoint: Path, tmp_path: Path
) -> None:
    (tmp_path / ".step-000007" / "state").mkdir(parents=True)
    models = models_of_rank(config_of(checkpoint))
    Checkpoints(tmp_path, keep_last=2).save(8, models, {}, checkpoint)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000008"]


def test_checkpoint_of_another_architecture_is_refused(
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


def test_batch_without_a_trainable_rollout_is_an_error_with_the_reason(checkpoint: Path) -> None:
    learner = learner_of(config_of(checkpoint))
    trials = ScriptedTrials(scored_by(learner), None, fail=True)
    rollout = asyncio.run(trials.run(Task("a", {}), kind=SessionKind.TRAIN, seed=3))
    rollout = replace(rollout, error="the sandbox is gone")
    with pytest.raises(TrainingError, match="the sandbox is gone"):
        TrainOn([Group("g", rollout.task, [rollout])]).on(Learners.of(learner))


def group_with_wrong_logprobs(learner: Learner) -> Group:
    trials = ScriptedTrials(scored_by(learner), None)
    rollout = asyncio.run(trials.run(Task("a", {}), kind=SessionKind.TRAIN, seed=3))
    segment = rollout.segments[0]
    segment.logprobs[segment.mask] = np.roll(segment.logprobs[segment.mask], 1)
    return Group("g", rollout.task, [rollout])


@pytest.mark.parametrize("prox", ["recompute", "reuse"])
def test_wrong_log_probabilities_from_the_engine_end_the_run(checkpoint: Path, prox: str) -> None:
    config = config_of(checkpoint, algorithm={"mini_batches": 1, "prox": prox})
    learner = learner_of(config)
    with pytest.raises(TrainingError, match=r"mean \|Δ log p\|"):
        TrainOn([group_with_wrong_logprobs(learner)]).on(Learners.of(learner))


def group_that_differs(learner: Learner, by: float) -> Group:
    """Two trials of the current weights whose log-probabilities differ by `by` from the
    trainer's."""
    trials = ScriptedTrials(scored_by(learner), None)
    rollouts = [
        asyncio.run(
            trials.run(Task("a", {}), kind=SessionKind.TRAIN, seed=seed, version=learner.version)
        )
        for seed in (3, 4)
    ]
    for rollout in rollouts:
        for segment in rollout.segments:
            segment.logprobs[segment.mask] -= by
    return Group("g", rollouts[0].task, rollouts)


@pytest.mark.parametrize("prox", ["recompute", "reuse"])
@pytest.mark.parametrize(
    ("first", "later", "engine", "refused"),
    [
        (0.0, 2e-4, {}, True),  # what kept keys and values of the last weights do
        (0.0, 5e-6, {}, False),
        (2e-5, 2e-4, {}, False),
        (2e-5, 6e-4, {}, True),
        (2e-4, 2e-4, {}, False),
        (0.0, 2e-4, {"verify_tolerance": 1e-3}, False),
        (0.0, 2e-4, {"dtype": "bfloat16"}, False),
    ],
)
def test_later_step_that_differs_more_than_the_first_ends_the_run(
    checkpoint: Path, prox: str, first: float, later: float, engine: dict[str, Any], refused: bool
) -> None:
    correction = {"weight": None} if prox == "reuse" else {}
    algorithm = {"mini_batches": 1, "prox": prox, "correction": correction}
    engine = {"verify_tolerance": 0.0} | engine
    learner = learner_of(config_of(checkpoint, algorithm=algorithm, engine=engine))
    TrainOn([group_that_differs(learner, first)]).on(Learners.of(learner))
    group = group_that_differs(learner, later)
    if refused:
        with pytest.raises(TrainingError, match=r"the first step differed by .*, so a part of"):
            TrainOn([group]).on(Learners.of(learner))
    else:
        TrainOn([group]).on(Learners.of(learner))


@pytest.mark.parametrize(
    ("prox", "passes"), [("recompute", 1), ("reuse", 0), ("log_linear", 0), ("behaviour", 0)]
)
def test_log_probabilities_are_computed_only_if_the_algorithm_uses_them(
    checkpoint: Path, prox: str, passes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    algorithm = {"prox": prox, "mini_batches": 1, "correction": {"weight": None}}
    learner = learner_of(config_of(checkpoint, algorithm=algorithm))
    trials = ScriptedTrials(scored_by(learner), None)
    rollouts = [
        asyncio.run(trials.run(Task("a", {}), kind=SessionKind.TRAIN, seed=seed)) for seed in (3, 4)
    ]
    passes_of_policy: list[Batch] = []
    batches: list[Batch] = []
    compute, compute_of_all = Policy.compute_logprobs, steps.compute_logprobs

    def counted(self: Policy, batch: Batch, *, temperature: float) -> Scores:
        passes_of_policy.append(batch)
        return compute(self, batch, temperature=temperature)

    def seen(models: Models, batch: Batch, *, temperature: float) -> Scores:
        batches.append(batch)
        return compute_of_all(models, batch, temperature=temperature)

    monkeypatch.setattr(Policy, "compute_logprobs", counted)
    monkeypatch.setattr(steps, "compute_logprobs", seen)
    trained = TrainOn([Group("g", rollouts[0].task, rollouts)]).on(Learners.of(learner))
    assert len(passes_of_policy) == len(batches) == passes
    for batch in batches:
        assert batch.entropies is not None
        assert (batch.entropies > 0).all()
    assert trained.metrics["mismatch/logp_abs_mean"] < 1e-5
