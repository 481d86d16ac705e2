"""The template for a loop of your own trains like the run's loop."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from agent_loop.records import Task
from agent_loop.tasks import Source, TaskStream
from tests.trainer.fake_engine import fake_engine
from tests.trainer.test_fit import ScriptedTrials, config_of, learner_of, scored_by
from trainer.cluster.engines import RunEngines
from trainer.cluster.rank_zero import RankRequest, RankZero
from trainer.learning.learner import Learner
from trainer.learning.policies import Learners
from trainer.mains import low_level as main_low_level

STEPS = 3


class DirectTrainer:
    """Serves requests in the caller's own thread."""

    def __init__(self, learner: Learner) -> None:
        self._learner = learner

    async def __call__(self, request: RankRequest[Any]) -> Any:
        return request.on(Learners.of(self._learner))


def test_low_level_loop_updates_the_engine_in_every_step(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_of(
        checkpoint,
        trainer={"steps": STEPS},
        rollout={"groups_per_step": 2, "group_size": 3},
        algorithm={"preset": "ppo", "kl": {"coefficient": 0.01}},
    )
    learner = learner_of(config)
    tasks = TaskStream([Source("s", [Task("a", {}), Task("b", {})])], seed=1)
    before = learner.score([1, 2, 3])
    with fake_engine() as (engine, url):
        learner.connect([url])
        trials = ScriptedTrials(scored_by(learner), None)
        engines = RunEngines(RankZero(DirectTrainer(learner)), given_urls=[url])
        history = asyncio.run(main_low_level.train(learner, engines, trials, tasks))
        learner.close()
        assert engine.version == str(STEPS)
        assert engine.calls.count("/update_weights") == STEPS + 1
    assert len(history) == STEPS
    assert learner.score([1, 2, 3]) != before
    assert all(metrics["mismatch/logp_abs_mean"] < 1e-5 for metrics in history)
    assert "step 3: reward" in capsys.readouterr().out


def test_engines_of_a_shared_gpu_sleep_while_the_loop_trains(checkpoint: Path) -> None:
    config = config_of(
        checkpoint,
        trainer={"steps": 1},
        rollout={"groups_per_step": 1, "group_size": 2},
        engine={"sleep": True},
    )
    learner = learner_of(config)
    tasks = TaskStream([Source("s", [Task("a", {})])], seed=1)
    with fake_engine() as (engine, url):
        learner.connect([url])
        trials = ScriptedTrials(scored_by(learner), None)
        engines = RunEngines(RankZero(DirectTrainer(learner)), given_urls=[url])
        asyncio.run(main_low_level.train(learner, engines, trials, tasks))
        learner.close()
        asked = [call for call in engine.calls if call in ("/sleep", "/wake_up", "/update_weights")]
    update = ["/sleep", "/update_weights", "/wake_up"]  # vLLM pauses by the same route
    assert asked == [*update, "/sleep", "/wake_up", *update]
