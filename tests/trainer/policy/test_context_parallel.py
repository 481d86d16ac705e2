"""Ranks that compute each micro-batch together give the results of one rank."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import Qwen3Config

from tests.trainer.policy.architectures import ARCHITECTURES
from tests.trainer.policy.float64 import in_float64
from tests.trainer.policy.forked_ranks import run_ranks
from tests.trainer.policy.test_policy import make_batch
from tests.trainer.policy.test_router_replay import routed_batch
from trainer.algorithms import AlgorithmConfig
from trainer.algorithms.token_loss import TokenLoss
from trainer.batch import Batch, joined
from trainer.errors import ConfigError
from trainer.learning.model_checks import check_models
from trainer.optimizer_config import OptimizerConfig
from trainer.policy.architecture import without_noise
from trainer.policy.context_parallel import ContextRanks, SharedLayout, split_heads
from trainer.policy.model_config import ModelConfig
from trainer.policy.parallel import Ranks
from trainer.policy.parallelism import Parallelism
from trainer.policy.policy import Policy
from trainer.policy.proof_on_copy import random_copy
from trainer.policy.shrink import shrunk
from trainer.rows.packing import Layout, MicroBatch

TOLERANCE = 1e-12
"""Largest difference, relative to the largest element of a tensor, in float64."""
MIXTURE: dict[str, Any] = {"router_aux_loss": 0.5, "router_replay": "replay"}


@dataclass(frozen=True, slots=True)
class Case:
    """Example: Case("Llama 3", {"gradient_checkpointing": True})"""

    title: str
    """Of one of `ARCHITECTURES`."""
    changes: tuple[tuple[str, Any], ...] = ()
    """Keys of `model`."""

    def save(self, folder: Path) -> Path:
        """The folder of the small random model, which is written if it does not exist."""
        path = folder / self.title.replace(" ", "-")
        if not path.exists():
            (found,) = (each for each in ARCHITECTURES if each.title == self.title)
            torch.manual_seed(0)
            model = random_copy(shrunk(without_noise(found.settings())))[0]
            model.save_pretrained(path)
        return path


CASES = (
    Case("Llama 3"),
    Case("Llama 3", (("gradient_checkpointing", True), ("share_prefixes", False))),
    Case("Llama 3", (("lora", {"rank": 2}),)),
    Case("Qwen 3 MoE", tuple(MIXTURE.items())),
    Case("Qwen 3.5"),
    Case("gpt-oss"),
)
EVERY = tuple(Case(each.title) for each in ARCHITECTURES if not each.refused)


@dataclass(frozen=True, slots=True)
class Computed:
    logprobs: Tensor
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]
    """After an optimizer step."""
    seen: float
    """A metric: the number of tokens that were trained."""


def batch_of(case: Case) -> Batch:
    return routed_batch(1) if dict(case.changes).get("router_replay") else make_batch(1)


def computed(path: Path, case: Case, ranks: Ranks) -> Computed:
    """Trains a tree once. The loss of a token depends on all tokens of its sequence, as in GSPO."""
    batch = batch_of(case)
    config = ModelConfig.model_validate(
        {"path": path, "max_micro_batch_tokens": 200, **dict(case.changes)}
    )
    torch.manual_seed(0)
    with patch("trainer.policy.model.prove", return_value=""):  # test_architectures.py does this
        policy = Policy(config, OptimizerConfig(lr=1e-2, eps=1e-2), ranks=ranks)
    parts = policy.parts(batch)
    part, tokens = parts[ranks.rank].batch, parts[ranks.rank].tokens
    scores = policy.compute_logprobs(part, temperature=0.8).logprobs
    gathered = ranks.gather(scores)
    weights = torch.linspace(-1, 1, batch.num_tokens)[tokens]

    def loss(logprobs: Tensor, entropy: Tensor, targets: Tensor) -> TokenLoss:
        sequence = part.sequence[targets]
        sums = torch.zeros(len(part.sequences)).index_add(0, sequence, logprobs)
        losses = weights[targets] * (logprobs * (1 + 0.01 * sums[sequence]) + 0.1 * entropy)
        return TokenLoss(losses, {"seen": torch.tensor(float(len(targets)))})

    late = policy.accumulate(policy.pack(part), part, loss, temperature=0.8, entropy_grad=True)
    seen = late.sums()["seen"]
    seen = ranks.sum_metrics({"seen": seen})["seen"]
    gradients = {n: whole(p.grad) for n, p in policy.model.named_parameters() if p.requires_grad}
    policy.step()
    trained = {n: p.clone() for n, p in policy.named_hf_parameters()}
    return Computed(
        joined(parts, gathered) if gathered else torch.zeros(0), gradients, trained, seen
    )


def whole(gradient: Any) -> Tensor:
    gathered: Tensor = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
    return gathered.clone()


def worker(
    rank: int, size: int, context: int, cases: Sequence[Case], models: Path, results: Path
) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    store = f"file://{results / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size)
    ranks = Ranks.of_process_group("cpu", Parallelism(context))
    for number, case in enumerate(cases):
        with in_float64():
            result = computed(case.save(models), case, ranks)
        if rank == 0:
            torch.save(
                (result.logprobs, result.gradients, result.weights, result.seen),
                results / f"{number}.pt",
            )
    dist.destroy_process_group()


def compare(size: int, context: int, cases: Sequence[Case], models: Path, results: Path) -> None:
    """Checks the cases on `size` ranks, of which `context` compute each micro-batch together."""
    with in_float64():
        for case in cases:
            case.save(models)
    run_ranks(worker, size, context, cases, models, results, ranks=size)
    for number, case in enumerate(cases):
        found = Computed(*torch.load(results / f"{number}.pt"))
        with in_float64():
            expected = computed(case.save(models), case, Ranks())
        title = f"{case}"
        assert found.seen == expected.seen == len(expected.logprobs), title
        assert distance(found.logprobs, expected.logprobs) < TOLERANCE, title
        for name, gradient in expected.gradients.items():
            assert distance(found.gradients[name], gradient) < TOLERANCE, (title, name)
        assert found.weights.keys() == expected.weights.keys()
        for name, weight in expected.weights.items():
            assert distance(found.weights[name], weight) < TOLERANCE, (title, name)


def distance(a: Tensor, b: Tensor) -> float:
    assert a.shape == b.shape
    scale = max(float(b.abs().max()), 1e-3) if b.numel() else 1.0
    return float((a - b).abs().max()) / scale if b.numel() else 0.0


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.mark.slow
def test_two_ranks_of_one_micro_batch_equal_one(models: Path, tmp_path: Path) -> None:
    compare(2, 2, CASES, models, tmp_path)


@pytest.mark.long
def test_two_groups_of_two_ranks_equal_one(models: Path, tmp_path: Path) -> None:
    compare(4, 2, CASES[:1], models, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("context", [1, 2])
def test_trees_in_pieces_on_two_ranks_equal_those_on_one(
    context: int, models: Path, tmp_path: Path
) -> None:
    """Ranks with other parts of the batch have other trees, and as many passes of each kind."""
    small = ("max_micro_batch_tokens", 24)
    cases = [
        Case("Llama 3", (small,)),
        Case("Llama 3", (small, ("lora", {"rank": 2}))),
        Case("Qwen 3.5", (small, ("gradient_checkpointing", True))),
    ]
    if context == 2:  # an auxiliary loss is of a pass, which differs where the trees do
        cases += [Case("Qwen 3 MoE", (small, *MIXTURE.items())), Case("gpt-oss", (small,))]
    compare(2, context, cases, models, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("context", [2, 4])
def test_four_ranks_equal_one(context: int, models: Path, tmp_path: Path) -> None:
    """With 4, the 2 heads of keys and values are copied."""
    compare(4, context, CASES, models, tmp_path)


@pytest.mark.long
def test_every_architecture_on_two_ranks_equals_one(models: Path, tmp_path: Path) -> None:
    compare(2, 2, EVERY, models, tmp_path)


def test_parts_of_a_micro_batch_hold_each_token_and_each_target_once() -> None:
    """The example of MicroBatch, [5 6 7] and [5 6 8 9] as a tree."""
    micro = MicroBatch(
        ids=torch.tensor([5, 6, 7, 8, 9]),
        positions=torch.tensor([0, 1, 2, 2, 3]),
        layout=Layout(torch.tensor([5, 5, 3, 5, 5]), 4),
        targets=torch.tensor([0, 1, 2]),
        predictors=torch.tensor([1, 1, 3]),
        experts=torch.arange(5)[:, None, None],
    )
    first, second = (ContextRanks(2, rank).part(micro) for rank in range(2))
    assert (first.ids.tolist(), second.ids.tolist()) == ([5, 6, 7], [8, 9, 0])
    assert second.positions.tolist() == [2, 3, 0]
    assert (first.predictors.tolist(), second.predictors.tolist()) == ([1, 1], [0])
    assert first.experts is not None
    assert second.experts is not None
    assert (first.experts.flatten().tolist(), second.experts.flatten().tolist()) == (
        [0, 1, 2],
        [3, 4, -1],
    )
    assert first.layout.runs == second.layout.runs == micro.layout.runs
    assert ContextRanks().part(micro) is micro


def test_heads_that_ranks_cannot_divide_are_refused_with_numbers(tmp_path: Path) -> None:
    Qwen3Config(num_attention_heads=12, vocab_size=96).save_pretrained(tmp_path)
    config, algorithm = ModelConfig(path=tmp_path), AlgorithmConfig()
    check_models(config, algorithm, Parallelism(6))
    with pytest.raises(
        ConfigError,
        match=r"trainer\.context_parallel=8: model\.path: .* has 12 attention heads, which 8 ranks"
        r" cannot divide; use 1 or 2 or 3 or 4 or 6",
    ):
        check_models(config, algorithm, Parallelism(8))
    layout = SharedLayout(torch.tensor([4, 4, 4, 4]), 4, ranks=ContextRanks(2))
    with pytest.raises(ValueError, match="a layer has 3 heads or channels"):
        split_heads(torch.zeros(2, 3, 1), layout, tokens=0, heads=1)
