"""Several ranks train rows with images like one rank; each keeps the tower whole."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoModelForImageTextToText

from tests.trainer.policy.forked_ranks import run_ranks
from tests.trainer.policy.test_image_trees import (
    PICTURES,
    StandIn,
    Written,
    batch_of,
    settings_of,
    tree,
)
from trainer.algorithms import AlgorithmConfig
from trainer.algorithms.token_loss import Metrics
from trainer.batch import Batch
from trainer.learning import steps
from trainer.learning.models import Finish, Models, build_models, follow
from trainer.optimizer_config import OptimizerConfig
from trainer.policy.image_reader import reader_of
from trainer.policy.model_config import ModelConfig
from trainer.policy.parallel import Ranks
from trainer.policy.parallelism import Parallelism
from trainer.policy.proof_on_copy import randomize

PROCESSOR = patch("trainer.extras.images.qwen.Processor", StandIn)


def models_of(path: Path, ranks: Ranks) -> Models:
    config = ModelConfig(path=path, max_micro_batch_tokens=40, vision="frozen")
    torch.manual_seed(0)
    optimizer = OptimizerConfig(lr=1e-2, eps=1e-2)
    settings = {"preset": "ppo", "mini_batches": 2}
    algorithm = AlgorithmConfig.model_validate(settings)
    return build_models(config, optimizer, algorithm, ranks=ranks)


def train(path: Path, ranks: Ranks) -> tuple[Metrics, dict[str, Tensor]]:
    models, metrics = models_of(path, ranks), Metrics()
    batch = batch_of(tree())
    batch.rewards = batch.trial_rewards = torch.linspace(0, 1, batch.num_rollouts)
    batch.returns = batch.rewards[batch.rollout]
    generator = torch.Generator().manual_seed(0)
    for _ in range(2):
        scores = steps.compute_logprobs(models, batch, temperature=1.0)
        batch.logprobs = scores.logprobs
        steps.compute_values(models, batch)
        models.algorithm.compute_advantages(batch)
        metrics |= steps.update(models, batch, temperature=1.0, version=0, generator=generator)
    with closing(models.weights()) as weights:
        return metrics, dict(weights)


def worker(rank: int, size: int, path: Path, folder: Path, divided: Parallelism) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size)
    ranks = Ranks.of_process_group("cpu", divided)
    with PROCESSOR:
        if rank == 0:
            torch.save(train(path, ranks), folder / "results.pt")
            ranks.tell(Finish())
        else:
            follow(models_of(path, ranks))
    ranks.leave()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "divided"),
    [
        ("qwen3_vl", Parallelism()),
        ("qwen3_5", Parallelism(context=2)),
        pytest.param("qwen3_5", Parallelism(), marks=pytest.mark.long),
        pytest.param("qwen3_vl", Parallelism(context=2), marks=pytest.mark.long),
        pytest.param("qwen3_vl", Parallelism(copies=2), marks=pytest.mark.long),
    ],
    ids=str,
)
def test_ranks_train_images_like_one(tmp_path: Path, kind: str, divided: Parallelism) -> None:
    torch.manual_seed(0)
    model: Any = AutoModelForImageTextToText.from_config(settings_of(kind))
    randomize(model)
    model.save_pretrained(tmp_path / "model")
    with PROCESSOR:
        expected_metrics, expected = train(tmp_path / "model", Ranks())
    run_ranks(worker, 2, tmp_path / "model", tmp_path, divided, ranks=2)
    metrics, weights = torch.load(tmp_path / "results.pt")
    assert metrics == pytest.approx(expected_metrics, rel=1e-4, abs=1e-5)
    assert weights.keys() == expected.keys()
    assert not any("visual" in name for name in weights)
    for name, weight in weights.items():
        torch.testing.assert_close(weight, expected[name], atol=1e-5, rtol=1e-4, msg=name)


@dataclass
class Step:
    """What one optimizer step of a rank had."""

    gradients: dict[str, Tensor]
    """Of the whole model, before they are clipped."""
    norm: float
    computed: int
    """How often the rank's tower computed an image for it."""


@dataclass
class Trained:
    """What a run has on rank 0."""

    metrics: list[Metrics]
    weights: list[list[tuple[str, Tensor]]]
    """After each update."""


def learner(path: Path, ranks: Ranks) -> tuple[Models, list[Step]]:
    """Models whose tower is trained, and their optimizer steps from now on."""
    torch.manual_seed(0)
    models = build_models(
        ModelConfig(path=path, max_micro_batch_tokens=40, vision="trained"),
        OptimizerConfig(lr=1e-2, eps=1e-2, weight_decay=0.1, max_grad_norm=0.5),
        AlgorithmConfig.model_validate({"preset": "grpo", "kl": None}),
        ranks=ranks,
    )
    model, stepper = models.policy.model, models.policy.stepper
    reader, found, computed, step = reader_of(model), list[Step](), list[int](), stepper.step
    assert reader is not None
    reader.tower.register_forward_hook(lambda *_: computed.append(1))

    def noted(late: Any = None) -> Metrics:
        named = [(name, each.grad) for name, each in model.named_parameters()]
        gradients = {name: whole(each) for name, each in named if each is not None}
        metrics = step(late)
        found.append(Step(gradients, metrics["grad_norm"], len(computed)))
        computed.clear()
        return metrics

    stepper.step = noted  # type: ignore[method-assign]
    return models, found


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def one_image() -> Batch:
    """Two paths, one of which has images, so that one of two ranks has none."""
    begin = Written(7).text(3).image(PICTURES[0])
    return batch_of([begin.text(4).image(PICTURES[2]).text(20), Written(8).text(38)])


def text() -> Batch:
    return batch_of([Written(9).text(24), Written(10).text(30)])


def updated(models: Models, *batches: Batch) -> Trained:
    run, generator = Trained([], []), torch.Generator().manual_seed(0)
    for batch in batches:
        batch.rewards = batch.trial_rewards = torch.linspace(0, 1, batch.num_rollouts)
        batch.returns = batch.rewards[batch.rollout]
        batch.logprobs = steps.compute_logprobs(models, batch, temperature=1.0).logprobs
        models.algorithm.compute_advantages(batch)
        found = steps.update(models, batch, temperature=1.0, version=0, generator=generator)
        run.metrics.append(found)
        with closing(models.weights()) as weights:
            run.weights.append([(name, each.clone()) for name, each in weights])
    return run


def trained_by(rank: int, size: int, path: Path, folder: Path, divided: Parallelism) -> None:
    """Three updates, a checkpoint, and one more from it, and from a single rank's checkpoint."""
    torch.set_num_threads(1)
    store = f"file://{folder / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size)
    ranks = Ranks.of_process_group("cpu", divided)
    with PROCESSOR:
        models, found = learner(path, ranks)
        other, more = learner(path, ranks)
        if rank == 0:
            run = updated(models, tree_batch(), one_image(), text())
            models.save_state(folder / "several")
            again = [updated(models, tree_batch())]
            models.load_state(folder / "several")
            again.append(updated(models, tree_batch()))
            models.finish()
            other.load_state(folder / "one")
            again.append(updated(other, tree_batch()))
            other.finish()
            torch.save((run, again), folder / "results.pt")
        else:
            follow(models)
            follow(other)
        reader = reader_of(models.policy.model)
        assert reader is not None
        torch.save((found, more, reader.tower.state_dict()), folder / f"rank{rank}.pt")
    ranks.leave()


def tree_batch() -> Batch:
    return batch_of(tree())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "divided"),
    [
        ("qwen3_vl", Parallelism()),
        pytest.param("qwen3_5", Parallelism(), marks=pytest.mark.long),
        pytest.param("qwen3_vl", Parallelism(context=2), marks=pytest.mark.long),
        pytest.param("qwen3_vl", Parallelism(copies=2), marks=pytest.mark.long),
    ],
    ids=str,
)
def test_ranks_train_the_tower_like_one(tmp_path: Path, kind: str, divided: Parallelism) -> None:
    """Also if only one rank has images, if none has any, and from a checkpoint of the other."""
    path = tmp_path / "model"
    torch.manual_seed(0)
    model: Any = AutoModelForImageTextToText.from_config(settings_of(kind))
    randomize(model)
    model.save_pretrained(path)
    with PROCESSOR:
        models, alone = learner(path, Ranks())
        run = updated(models, tree_batch(), one_image(), text())
        models.save_state(tmp_path / "one")
        last = updated(models, tree_batch())
    run_ranks(trained_by, 2, path, tmp_path, divided, ranks=2)
    several, again = torch.load(tmp_path / "results.pt", weights_only=False)
    same_run(several, run)
    for each in again:
        same_run(each, last)
    assert again[0].metrics == again[1].metrics
    with PROCESSOR:
        models, _ = learner(path, Ranks())
        models.load_state(tmp_path / "several")
        same_run(updated(models, tree_batch()), last)

    found = [torch.load(tmp_path / f"rank{rank}.pt", weights_only=False) for rank in range(2)]
    for steps_of_rank, more, _ in found:
        for step, expected in zip([*steps_of_rank, *more], [*alone, *alone[3:] * 2], strict=True):
            same_step(step, expected)
    computed = [[step.computed for step in each[0][:3]] for each in found]
    if divided.context == 1:  # else both have the whole batch
        assert sorted(each[1] for each in computed) == [0, 4]
        assert all(each[0] > 0 for each in computed)
    assert [each[2] for each in computed] == [0, 0]
    for name, weight in found[0][2].items():
        assert torch.equal(weight, found[1][2][name]), name


def same_run(found: Trained, expected: Trained) -> None:
    for metrics, own in zip(found.metrics, expected.metrics, strict=True):
        assert metrics == pytest.approx(own, rel=1e-4, abs=1e-5)
    for weights, whole_weights in zip(found.weights, expected.weights, strict=True):
        names = [name for name, _ in weights]
        assert names == [name for name, _ in whole_weights]
        assert len(set(names)) == len(names)
        assert any("visual" in name for name in names)
        for (name, weight), (_, whole) in zip(weights, whole_weights, strict=True):
            torch.testing.assert_close(weight, whole, atol=1e-5, rtol=1e-4, msg=name)


def same_step(found: Step, expected: Step) -> None:
    assert found.norm == pytest.approx(expected.norm, rel=1e-5)
    assert found.norm > 0.5  # so that it is clipped
    assert found.gradients.keys() == expected.gradients.keys()
    for name, gradient in found.gradients.items():
        own = expected.gradients[name]
        scale = float(own.abs().max())
        torch.testing.assert_close(gradient, own, rtol=1e-4, atol=1e-5 * scale + 1e-8, msg=name)
