"""Functions of one's own as parts of a run: each example works, and a wrong one is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agent_loop.errors import CreditError
from agent_loop.producers.groups import ProductionError
from agent_loop.producers.rollout_config import RolloutConfig
from agent_loop.producers.sync import SyncProducer
from agent_loop.records import Group, Rollout, Task
from agent_loop.tasks import DataConfig, Source, TaskStream, training_tasks
from agent_loop.trial.credit import CreditConfig, assign_credit
from examples.own_parts.partial_grade import grade
from examples.quickstart.shop import right_answer
from proxy.errors import ConfigurationError
from proxy.records import Turn
from tests.agent_loop.recorded import turn
from tests.agent_loop.scripted_loop import ScriptedLoop
from tests.trainer.rollouts import group, rollout
from trainer.algorithms import Algorithm, AlgorithmConfig
from trainer.batch import Batch, build_batch
from trainer.errors import ConfigError, TrainingError
from trainer.run.log import LoggingConfig
from trainer.run.own_metrics import OwnMetrics, own_metrics
from trainer.settings.sources import load

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples/own_parts"
EXAMPLES = "examples.own_parts"
HERE = "tests.examples.test_own_parts"


def parts(*rewards: float) -> Batch:
    """A batch of one group with these rewards."""
    rng = np.random.default_rng(0)
    rollouts = [rollout(rng, f"r{i}", reward=reward) for i, reward in enumerate(rewards)]
    return build_batch([Group("g", Task("g", {}), rollouts)])


def advantages(advantage: Any, batch: Batch) -> torch.Tensor:
    algorithm = Algorithm(AlgorithmConfig.model_validate({"advantage": advantage}))
    algorithm.compute_advantages(batch)
    assert batch.advantages is not None
    return batch.advantages


def test_one_configuration_names_an_example_of_every_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    config = load([FOLDER / "agentic_trainer.yaml"])
    named = (FOLDER / "agentic_trainer.yaml").read_text()
    unnamed = [file.name for file in FOLDER.glob("[!_]*.py") if f"/{file.name}:" not in named]
    assert unnamed == ["ollama_engine.py"]  # a part of the proxy: test_ollama_engine.py
    assert config.algorithm.loss.name.endswith("bounded_loss.py:bounded")
    assert config.remote_agent.credit.function is not None


def test_advantage_is_the_distance_to_the_median_of_the_group() -> None:
    batch = parts(0.0, 0.25, 1.0)
    by_rollout = advantages(f"{EXAMPLES}.above_median:above_median", batch)
    assert torch.equal(by_rollout, torch.tensor([-0.25, 0.0, 0.75])[batch.rollout])


def test_loss_has_the_gradient_of_its_formula() -> None:
    batch = parts(0.0, 1.0)
    given = {"name": f"{EXAMPLES}.bounded_loss:bounded", "bound": 1.1}
    config = AlgorithmConfig.model_validate(
        {"advantage": "dr_grpo", "loss": given, "prox": "behaviour", "correction": {"weight": None}}
    )
    algorithm = Algorithm(config)
    algorithm.compute_advantages(batch)
    assert batch.advantages is not None
    shift = torch.linspace(-0.5, 0.5, batch.num_tokens)
    logprobs = (batch.logprobs + shift).requires_grad_()
    entropy, targets = torch.zeros(batch.num_tokens), torch.arange(batch.num_tokens)
    algorithm.loss(batch)(logprobs, entropy, targets).losses.sum().backward()
    ratio = shift.exp()
    weights = config.aggregation.weights(batch.sequence, batch.rollout)
    expected = -weights * batch.advantages * torch.where(ratio < 1.1, ratio, 0.0)
    assert logprobs.grad is not None
    torch.testing.assert_close(logprobs.grad, expected, atol=1e-6, rtol=1e-5)


def test_tasks_are_the_quickstarts_orders_of_a_limited_size() -> None:
    function = {"target": f"{EXAMPLES}.orders:orders", "settings": {"most_things": 1}}
    data = DataConfig.model_validate({"train_sources": {"orders": {"function": function}}})
    stream = training_tasks(data, needs_prompt=True)
    assert {len(stream.draw().data["order"]) for _ in range(20)} == {1}


def test_reward_gives_half_for_an_answer_at_all(tmp_path: Path) -> None:
    task = {"order": {"pens": 3}, "prices": {"pens": 14}}

    class Call:
        workspace = tmp_path

    Call.task = task  # type: ignore[attr-defined]
    assert grade(Call())["reward"] == 0  # type: ignore[arg-type]
    (tmp_path / "answer.txt").write_text("I do not know")
    assert grade(Call())["reward"] == 0.5  # type: ignore[arg-type]
    (tmp_path / "answer.txt").write_text(right_answer(task["order"], task["prices"]))
    assert grade(Call()) == {"reward": 1, "right": 1, "answered": 1}  # type: ignore[arg-type]


def turns() -> list[Turn]:
    return [turn(i, i - 1 if i else None, 2 * i, [1], [2]) for i in range(6)]


def test_credit_goes_to_the_last_answers_and_the_others_are_context() -> None:
    function = {"target": f"{EXAMPLES}.last_answers:last_answers", "settings": {"count": 2}}
    credit = assign_credit(turns(), 0.5, (), CreditConfig.model_validate({"function": function}))
    assert credit.returns == {4: 0.5, 5: 0.5}
    assert credit.shares == {4: 1.0, 5: 1.0}
    assert credit.untrained == {0, 1, 2, 3}


def stream(**levels: int) -> TaskStream:
    tasks = [Task(name, {"level": level}, "a") for name, level in levels.items()]
    return TaskStream([Source("a", tasks)], seed=0, shuffle=False)


async def test_producer_tries_the_easier_of_two_tasks_also_after_it_is_resumed() -> None:
    config = RolloutConfig.model_validate(
        {
            "groups_per_step": 2,
            "group_size": 2,
            "producer": f"{EXAMPLES}.easier_of_two:easier_of_two",
        }
    )
    assert config.producer is not None
    levels = {"a": 2, "b": 1, "c": 1, "d": 2, "e": 3, "f": 2, "g": 1, "h": 5}
    whole = config.producer(ScriptedLoop(), stream(**levels), config, 0)
    first = await whole.next_batch(0)
    assert [each.task.task_id for each in first] == ["b", "c"]
    resumed = config.producer(ScriptedLoop(), stream(**levels), config, 0)
    resumed.start(0, whole.state())
    continued = await resumed.next_batch(0)
    assert [each.task.task_id for each in continued] == ["f", "g"]
    assert [r.seed for g in continued for r in g.rollouts] == [
        r.seed for g in await whole.next_batch(0) for r in g.rollouts
    ]


async def test_filter_replaces_groups_that_are_too_easy_or_too_hard() -> None:
    rewards = {"easy": lambda seed: 1.0, "hard": lambda seed: 0.0, "fair": lambda seed: seed % 2}
    loop = ScriptedLoop(reward=lambda task, seed: float(rewards[task.task_id](seed)))
    config = RolloutConfig.model_validate(
        {
            "groups_per_step": 2,
            "group_size": 16,
            "filter": f"{EXAMPLES}.neither_easy_nor_hard:neither_easy_nor_hard",
        }
    )
    tasks = [Task(name, {}, "a") for name in rewards]
    producer = SyncProducer(loop, TaskStream([Source("a", tasks)], seed=0), config, seed=0)
    groups = await producer.next_batch(0)
    assert [each.task.task_id for each in groups] == ["fair", "fair"]
    assert producer.counts["filtered"] >= 2


def no_group(group: Group) -> bool:
    return False


async def test_filter_that_leaves_out_every_group_ends_the_run() -> None:
    config = RolloutConfig.model_validate(
        {"groups_per_step": 2, "group_size": 2, "filter": f"{HERE}:no_group", "max_resamples": 3}
    )
    tasks = TaskStream([Source("a", [Task("a", {})])], seed=0)
    producer = SyncProducer(ScriptedLoop(), tasks, config, seed=0)
    with pytest.raises(ProductionError, match="no_group left out 6 groups in a row"):
        await producer.next_batch(0)
    assert producer.counts["filtered"] == 6


def rollouts(*rewards: float) -> list[Rollout]:
    made = group(np.random.default_rng(0), "g", size=len(rewards)).rollouts
    return [
        replace(each, reward=r, num_turns=i)
        for i, (each, r) in enumerate(zip(made, rewards, strict=True))
    ]


def test_metric_is_the_mean_number_of_turns_of_successes() -> None:
    metric = LoggingConfig.model_validate(
        {"metrics": [f"{EXAMPLES}.turns_of_successes:turns_of_successes"]}
    ).metrics
    assert own_metrics(metric, rollouts(0.0, 1.0, 0.5, 1.0), ()) == {"success/turns": 2.0}
    assert own_metrics(metric, rollouts(0.0), ()) == {}
    with pytest.raises(
        TrainingError, match=r"successes returned \['success/turns'\], which the run"
    ):
        own_metrics(metric, rollouts(1.0), ("success/turns",))


def nothing() -> None: ...


def something(*anything: Any, **settings: Any) -> str:
    return "x"


@pytest.mark.parametrize(
    ("key", "right"),
    [
        ("algorithm.advantage", r"def nothing\(returns: Returns\) -> Tensor"),
        ("algorithm.loss", r"def nothing\(logprobs: Tensor, prox: Tensor, advantages: Tensor, seq"),
        ("remote_agent.credit.function", r"def nothing\(turns: Sequence\[Turn\], reward: float \|"),
        ("data.train_sources.mine.function", r"def nothing\(seed: int\) -> Iterable\[Mapping"),
        ("rollout.filter", r"def nothing\(group: Group\) -> bool"),
        ("rollout.producer", r"def nothing\(loop: RunsTrials, tasks: TaskStream, config: Rollout"),
        ("logging.metrics", r"def nothing\(rollouts: Sequence\[Rollout\]\) -> Mapping"),
    ],
)
def test_function_with_another_signature_is_refused_with_the_right_one(
    key: str, right: str
) -> None:
    value = f"[{HERE}:nothing]" if key == "logging.metrics" else f"{HERE}:nothing"
    overrides = ["model.path=/m", "remote_agent.command.argv=[agent]", f"{key}={value}"]
    with pytest.raises(ConfigError, match=rf"signature nothing\(\) .*: .*; write it as {right}"):
        load([], overrides)


def test_function_that_returns_something_else_is_refused_with_what_it_returned() -> None:
    target = f"{HERE}:something"
    credit = CreditConfig.model_validate({"function": target})
    with pytest.raises(CreditError, match=r"returned 'x'; it must map .* turns, here \[0, 1, 2, 3"):
        assign_credit(turns(), 1.0, (), credit)
    config = RolloutConfig.model_validate({"producer": target})
    assert config.producer is not None
    with pytest.raises(ConfigurationError, match="returned a str without acknowledge, close,"):
        config.producer(ScriptedLoop(), stream(a=1), config, 0)
    with pytest.raises(TrainingError, match="returned a str; it must map names"):
        own_metrics([OwnMetrics.model_validate(target)], [], ())
    with pytest.raises(TrainingError, match="returned a str; it must return one advantage"):
        advantages(target, parts(0.0, 1.0))
    algorithm = Algorithm(AlgorithmConfig.model_validate({"loss": target, "prox": "reuse"}))
    batch = parts(0.0, 1.0)
    algorithm.compute_advantages(batch)
    zeros, targets = torch.zeros(batch.num_tokens), torch.arange(batch.num_tokens)
    with pytest.raises(TrainingError, match="returned a str; it must return one loss"):
        algorithm.loss(batch)(zeros, zeros, targets)


@pytest.mark.parametrize(("other", "value"), [("policy", "branch"), ("turn_discount", 0.5)])
def test_credit_by_a_function_and_by_another_key_is_refused(other: str, value: object) -> None:
    with pytest.raises(ValueError, match=rf"takes the place of credit\.{other}"):
        CreditConfig.model_validate({"function": f"{HERE}:something", other: value})


def test_own_parts_of_a_batch_are_refused_with_a_swarm() -> None:
    overrides = ["model.path=/m", f"rollout.filter={HERE}:no_group", "swarm={}"]
    with pytest.raises(ConfigError, match=r"rollout\.filter: a swarm's clients choose"):
        load([], overrides)
