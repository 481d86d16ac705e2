"""Ranks that divide the model give the results of one rank."""

from __future__ import annotations

import importlib.util
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

from tests.needs import needs
from tests.trainer.policy.architectures import ARCHITECTURES
from tests.trainer.policy.forked_ranks import run_ranks
from tests.trainer.policy.test_policy import make_batch
from trainer.algorithms.token_loss import TokenLoss
from trainer.batch import Batch, joined
from trainer.extras.automodel.policy import AutomodelPolicy
from trainer.extras.automodel.vocabulary_parallel import divided_logprobs
from trainer.optimizer_config import OptimizerConfig
from trainer.policy.architecture import without_noise
from trainer.policy.model_config import ModelConfig
from trainer.policy.parallel import Ranks
from trainer.policy.parallelism import Parallelism
from trainer.policy.policy import Policy
from trainer.policy.proof_on_copy import random_copy
from trainer.policy.shrink import shrunk
from trainer.policy.token_logprobs import OutputLayer, token_logprobs
from trainer.policy.trainable import TrainablePolicy
from trainer.run.state_folder import read_state, write_state
from trainer.weight_sync.probe import probe_batch

pytestmark = needs(
    None
    if importlib.util.find_spec("nemo_automodel")
    else "nemo-automodel: python -m benchmarks.install reference"
)
TOLERANCE = 1e-5
"""Largest difference, relative to the largest element of a tensor."""
TENSOR, PIPELINE, EXPERT = Parallelism(tensor=2), Parallelism(pipeline=2), Parallelism(expert=2)


@dataclass(frozen=True, slots=True)
class Case:
    """Example: Case("Llama 3", TENSOR, tied=True)"""

    title: str
    """Of one of `ARCHITECTURES`."""
    parallelism: Parallelism
    tied: bool = False
    changes: tuple[tuple[str, Any], ...] = ()
    """Keys of `model`."""
    resumed: Parallelism | None = None
    """How ranks divide the model when they go on from the saved state; None: as before."""

    def save(self, folder: Path) -> Path:
        """The folder of the small random model, which is written if it does not exist."""
        path = folder / f"{self.title.replace(' ', '-')}{'-tied' if self.tied else ''}"
        if not path.exists():
            (found,) = (each for each in ARCHITECTURES if each.title == self.title)
            settings = shrunk(without_noise(found.settings()))
            settings.tie_word_embeddings = self.tied
            torch.manual_seed(0)
            random_copy(settings)[0].save_pretrained(path)
        return path


@dataclass(frozen=True, slots=True)
class Computed:
    logprobs: Tensor
    probe: Tensor
    """Log-probabilities of a single sequence, which leaves other groups of ranks without any, by a
    frozen copy of the policy."""
    metrics: list[dict[str, float]]
    """Of two optimizer steps."""
    weights: dict[str, Tensor]
    """After them, as they are exported."""
    again: dict[str, Tensor]
    """As `weights`; the second step was executed from the saved state of the first."""


def policy_of(path: Path, case: Case, ranks: Ranks, *, frozen: bool = False) -> TrainablePolicy:
    config = ModelConfig.model_validate(
        {"path": path, "max_micro_batch_tokens": 64, **dict(case.changes)}
    )
    torch.manual_seed(0)
    optimizer = None if frozen else OptimizerConfig(lr=1e-2, eps=1e-2, max_grad_norm=0.5)
    with patch("trainer.policy.model.prove"), patch("trainer.extras.automodel.divided_model.prove"):
        if ranks.parallelism.divides_model:
            return AutomodelPolicy(config, optimizer, device="cpu", ranks=ranks)
        return Policy(config, optimizer, ranks=ranks)


def step(policy: TrainablePolicy, batch: Batch) -> dict[str, float]:
    """The loss of a token depends on all tokens of its sequence, as in GSPO."""
    ranks = policy.ranks
    found = policy.parts(batch)[ranks.rank]
    part, weights = found.batch, torch.linspace(-1, 1, batch.num_tokens)[found.tokens]

    def loss(logprobs: Tensor, entropy: Tensor, targets: Tensor) -> TokenLoss:
        sequence = part.sequence[targets]
        sums = torch.zeros(len(part.sequences)).index_add(0, sequence, logprobs)
        losses = weights[targets] * (logprobs * (1 + 0.01 * sums[sequence]) + 0.1 * entropy)
        seen = torch.tensor(float(len(targets)))
        return TokenLoss(losses, {"seen": seen, "loss": losses.sum()})

    micros = policy.pack(part)
    late = policy.accumulate(micros, part, loss, temperature=0.8, entropy_grad=True)
    return ranks.sum_metrics(late.sums()) | policy.step()


def with_left(batch: Batch) -> Batch:
    """The batch, of whose tokens every third was sampled from all and the others from three."""
    others = torch.randint(5, 20, (batch.num_tokens, 2), generator=torch.Generator().manual_seed(2))
    batch.kept = torch.cat([batch.ids[:, None], others], 1)
    batch.kept[::3] = -1
    return batch


def computed(path: Path, case: Case, ranks: Ranks, folder: Path) -> Computed:
    """Trains packed trees twice."""
    batch, policy = with_left(make_batch(1)), policy_of(path, case, ranks)
    logprobs = scored(policy, batch)
    probe = scored(policy_of(path, case, ranks, frozen=True), probe_batch([5, 6, 7, 8, 9, 5]))
    metrics = [step(policy, batch)]
    write_state(policy.state_dict(), folder)
    metrics.append(step(policy, batch))
    weights = {name: each.clone() for name, each in policy.named_hf_parameters()}
    described = {name: (each.shape, each.dtype) for name, each in policy.hf_shapes()}
    assert described == {name: (each.shape, each.dtype) for name, each in weights.items()}
    if case.resumed is not None and ranks.size > 1:
        ranks = Ranks.of_process_group("cpu", case.resumed)
    resumed = policy_of(path, case, ranks)
    state = resumed.state_dict()
    read_state(state, folder)
    resumed.load_state_dict(state)
    step(resumed, batch)
    again = {name: each.clone() for name, each in resumed.named_hf_parameters()}
    return Computed(logprobs, probe, metrics, weights, again)


def scored(policy: TrainablePolicy, batch: Batch) -> Tensor:
    """The log-probabilities of the batch on rank 0."""
    parts = policy.parts(batch)
    scores = policy.compute_logprobs(parts[policy.ranks.rank].batch, temperature=0.8)
    gathered = policy.ranks.gather(scores.logprobs)
    return joined(parts, gathered) if gathered else torch.zeros(0)


def worker(rank: int, size: int, cases: Sequence[Case], models: Path, results: Path) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    store = f"file://{results / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size)
    for number, case in enumerate(cases):
        ranks = Ranks.of_process_group("cpu", case.parallelism)
        found = computed(case.save(models), case, ranks, results / f"state-{number}")
        if rank == 0:
            values = (found.logprobs, found.probe, found.metrics, found.weights, found.again)
            torch.save(values, results / f"{number}.pt")
    dist.destroy_process_group()


def compare(size: int, cases: Sequence[Case], models: Path, results: Path) -> None:
    """Checks the cases on `size` ranks."""
    for case in cases:
        case.save(models)
    run_ranks(worker, size, cases, models, results, ranks=size)
    for number, case in enumerate(cases):
        found = Computed(*torch.load(results / f"{number}.pt"))
        expected = computed(case.save(models), case, Ranks(), results / f"expected-{number}")
        title = f"{case}"
        assert distance(found.logprobs, expected.logprobs) < TOLERANCE, title
        assert len(expected.probe) == 5
        assert distance(found.probe, expected.probe) < TOLERANCE, title
        for each, theirs in zip(found.metrics, expected.metrics, strict=True):
            assert each == pytest.approx(theirs, rel=TOLERANCE), title
        assert found.weights.keys() == expected.weights.keys(), title
        for name, weight in expected.weights.items():
            assert distance(found.weights[name], weight) < TOLERANCE, (title, name)
            limit = 0 if case.resumed is None else TOLERANCE
            assert distance(found.again[name], found.weights[name]) <= limit, (title, name)


def distance(a: Tensor, b: Tensor) -> float:
    assert a.shape == b.shape
    scale = max(float(b.abs().max()), 1e-3)
    return float((a - b).abs().max()) / scale


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


CHECKPOINTING = (("gradient_checkpointing", True),)
CASES = (
    Case("Qwen 3", TENSOR, resumed=PIPELINE),
    Case("Qwen 2.5", TENSOR, tied=True),
    Case("Llama 3", TENSOR, changes=CHECKPOINTING),
    Case("Qwen 3", PIPELINE),
    Case("Qwen 3 MoE", PIPELINE, changes=CHECKPOINTING),
    Case("Qwen 3 MoE", EXPERT),
)
SEVERAL = (
    Case("Qwen 3", Parallelism(tensor=2, pipeline=2)),
    Case("Qwen 3", TENSOR, tied=True),
    Case("Qwen 3 MoE", EXPERT),
)
MORE = (
    Case("Mistral", TENSOR),
    Case("Qwen 2.5", PIPELINE),
    Case("Mistral", PIPELINE),
    Case("Llama 3", Parallelism(tensor=2, pipeline=2), changes=CHECKPOINTING),
    Case("Qwen 3 MoE", Parallelism(pipeline=2, expert=2), changes=CHECKPOINTING),
)


@pytest.mark.parametrize("softened", [0.7, 0.01])
def test_scores_of_divided_logits_over_what_was_left_are_those_of_the_whole_ones(
    softened: float,
) -> None:
    generator = torch.Generator().manual_seed(1)
    hidden, weight = (
        (torch.randn(shape, generator=generator) * 2).requires_grad_()
        for shape in ((9, 6), (40, 6))
    )
    kept = torch.stack([torch.randperm(40, generator=generator)[:4] for _ in range(9)])
    ids = kept[:, 2].clone()
    kept[4] = -1
    found = [
        divided_logprobs(hidden @ weight.T, ids, softened, kept=kept, entropy_grad=True),
        token_logprobs(hidden, OutputLayer(weight), ids, softened, kept=kept, entropy_grad=True),
    ]
    gradients = [
        torch.autograd.grad((logp + 0.5 * entropy).sum(), (hidden, weight))
        for logp, entropy in found
    ]
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)
    for mine, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-3, rtol=1e-4)


@pytest.mark.slow
def test_two_ranks_with_parts_of_matrices_layers_or_experts_equal_one(
    models: Path, tmp_path: Path
) -> None:
    compare(2, CASES, models, tmp_path)


@pytest.mark.long
def test_four_ranks_that_divide_model_and_batch_equal_one(models: Path, tmp_path: Path) -> None:
    compare(4, SEVERAL, models, tmp_path)


@pytest.mark.long
def test_four_ranks_equal_one_with_more_models(models: Path, tmp_path: Path) -> None:
    compare(4, MORE, models, tmp_path)
