"""Training on a tree in pieces equals training on each sequence alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.trainer.policy.test_policy import gradients, make_batch
from tests.trainer.policy.test_router_replay import mixture, routed_batch
from trainer.algorithms import Algorithm, AlgorithmConfig
from trainer.algorithms.token_loss import Metrics
from trainer.batch import Batch
from trainer.learning.models import Models
from trainer.learning.steps import (
    base_logprobs,
    compute_logprobs,
    compute_ref_logprobs,
    compute_values,
    update,
)
from trainer.optimizer import Unread
from trainer.optimizer_config import OptimizerConfig
from trainer.policy.compiled_layers import compile_layers
from trainer.policy.critic import Critic
from trainer.policy.model import blocks
from trainer.policy.model_config import ModelConfig
from trainer.policy.policy import Policy
from trainer.rows.prefix_tree import Forest

__all__ = ["mixture"]  # a fixture

PIECES = 24
"""Tokens of a piece: the trees of the batches have about 150, and paths of up to 60."""
ALGORITHM: dict[str, Any] = {
    "preset": "grpo",
    "loss": "gspo",  # the ratio of a sequence, whose tokens are in several pieces
    "entropy_coefficient": 0.01,
    "aggregation": "sequence_mean_token_mean",
    "kl": {"coefficient": 0.1},
}

every_way_to_keep = pytest.mark.parametrize(
    "changes",
    [
        {},
        {"gradient_checkpointing": True},
        {"activation_offload": True},
        {"lora": {"rank": 2}},
    ],
    ids=str,
)


def trained(
    path: Path,
    batch: Batch,
    model: dict[str, Any],
    algorithm: dict[str, Any],
    prepare: Callable[[Policy], None] | None = None,
) -> tuple[Policy, Metrics, dict[str, Tensor]]:
    """The policy, the metrics and the gradients of one update, which leaves the weights."""
    config = ModelConfig.model_validate({"path": path} | model)
    torch.manual_seed(0)
    policy = Policy(config, OptimizerConfig(lr=1e-9))
    if prepare is not None:
        prepare(policy)
    found: dict[str, Tensor] = {}
    step = policy.step

    def kept(late: Unread | None = None) -> Metrics:
        found.update(gradients(policy.model))
        return step(late)

    policy.step = kept  # type: ignore[method-assign]
    models = Models(policy, Algorithm(AlgorithmConfig.model_validate(algorithm)))
    compute_logprobs(models, batch, temperature=0.8)
    assert batch.prox_logprobs is not None
    batch.ref_logprobs = batch.prox_logprobs - torch.linspace(-0.2, 0.2, batch.num_tokens)
    batch.prox_logprobs = batch.prox_logprobs - torch.linspace(-2e-4, 3e-4, batch.num_tokens)
    models.algorithm.compute_advantages(batch)
    generator = torch.Generator().manual_seed(0)
    metrics = update(models, batch, temperature=0.8, version=3, generator=generator)
    return policy, metrics, found


def assert_equal(got: tuple[Any, ...], expected: tuple[Any, ...]) -> None:
    _, metrics, found = got
    _, alone, gradients_alone = expected
    assert metrics == pytest.approx(alone, rel=1e-5, abs=1e-6)
    assert found.keys() == gradients_alone.keys()
    for name, gradient in gradients_alone.items():
        scale = float(gradient.abs().max())
        assert float((found[name] - gradient).abs().max()) <= 1e-5 * max(scale, 1e-3), name


@every_way_to_keep
@pytest.mark.parametrize("seed", [1, 4])
def test_update_in_pieces_equals_that_of_each_sequence(
    checkpoint: Path, changes: dict[str, Any], seed: int
) -> None:
    ways = (
        {"max_micro_batch_tokens": PIECES},
        {"max_micro_batch_tokens": 4096, "share_prefixes": False},
    )
    got, expected = (
        trained(checkpoint, make_batch(seed), changes | way, ALGORITHM) for way in ways
    )
    micros = got[0].pack(make_batch(seed))
    assert sum(micro.reads_only for micro in micros) > 2
    divided = [micro.piece for micro in micros if micro.piece and len(micro.piece.companions)]
    assert divided
    assert_equal(got, expected)


@pytest.mark.filterwarnings("ignore")
@every_way_to_keep
def test_update_in_pieces_with_compiled_layers_equals_that_of_each_sequence(
    checkpoint: Path, changes: dict[str, Any]
) -> None:
    """And all of its passes have the same graphs: one before attention, and one after it."""
    graphs = 0

    def counting(graph: torch.fx.GraphModule, _inputs: list[Tensor]) -> Any:
        nonlocal graphs
        graphs += 1
        return graph.forward

    torch._dynamo.reset()
    pieces = changes | {"max_micro_batch_tokens": PIECES + 4}  # no pass has a single token
    got = trained(
        checkpoint,
        make_batch(3),
        pieces,
        ALGORITHM,
        lambda policy: compile_layers(blocks(policy.model), counting),
    )
    torch._dynamo.reset()
    assert any(micro.reads_only for micro in got[0].pack(make_batch(3)))
    alone = changes | {"max_micro_batch_tokens": 4096, "share_prefixes": False}
    assert_equal(got, trained(checkpoint, make_batch(3), alone, ALGORITHM))
    assert graphs == 2


def test_replayed_experts_in_pieces_equal_those_of_a_tree(mixture: Path) -> None:
    ways = ({"max_micro_batch_tokens": PIECES}, {"max_micro_batch_tokens": 4096})
    got, expected = (
        trained(mixture, routed_batch(1), {"router_replay": "replay"} | way, ALGORITHM)
        for way in ways
    )
    assert_equal(got, expected)


def test_each_token_of_a_tree_in_pieces_is_routed_once(mixture: Path) -> None:
    """The shares of the passes in the auxiliary loss are those of the tree's tokens."""
    config = ModelConfig(path=mixture, max_micro_batch_tokens=PIECES, router_aux_loss=0.5)
    policy, batch = Policy(config, OptimizerConfig(lr=1e-3)), make_batch(1)
    micros = policy.pack(batch)
    tokens = [0 if micro.reads_only else len(micro.ids) for micro in micros]
    assert any(micro.reads_only for micro in micros)
    assert [micro.share for micro in micros] == pytest.approx([n / sum(tokens) for n in tokens])


def test_values_and_updates_of_a_critic_are_equal(checkpoint: Path) -> None:
    found = []
    for tokens, share in ((PIECES, True), (4096, False)):
        config = ModelConfig(path=checkpoint, max_micro_batch_tokens=tokens, share_prefixes=share)
        critic, batch = Critic(config, OptimizerConfig(lr=1e-3)), make_batch(1)
        generator = torch.Generator().manual_seed(0)
        torch.nn.init.normal_(critic.module.head.weight, std=0.1, generator=generator)
        batch.values = critic.compute_values(batch)
        algorithm = Algorithm(AlgorithmConfig.model_validate({"preset": "ppo"}))
        batch.prox_logprobs = batch.logprobs
        algorithm.compute_advantages(batch)
        loss = algorithm.value_loss(batch)
        critic.accumulate(critic.pack(batch), batch, loss)
        found.append((batch.values, gradients(critic.module)))
    (values, grads), (values_alone, grads_alone) = found
    torch.testing.assert_close(values, values_alone, atol=1e-5, rtol=0)
    for name, gradient in grads_alone.items():
        torch.testing.assert_close(grads[name], gradient, atol=1e-5, rtol=1e-4, msg=name)


def scored(models: Models, who: str, batch: Batch) -> Tensor | None:
    if who == "policy":
        return compute_logprobs(models, batch, temperature=0.8).logprobs
    if who == "base":
        return base_logprobs(models, batch, temperature=0.8).logprobs
    if who == "reference":
        compute_ref_logprobs(models, batch, temperature=0.8)
        return batch.ref_logprobs
    compute_values(models, batch)
    return batch.values


@pytest.mark.parametrize("who", ["policy", "base", "reference", "critic"])
def test_scoring_computes_each_token_of_the_tree_once(checkpoint: Path, who: str) -> None:
    """The log-probabilities of the proximal policy, the base and the reference, and values."""
    found = []
    for tokens, share in ((PIECES, True), (4096, False)):
        given: dict[str, Any] = {"path": checkpoint, "max_micro_batch_tokens": tokens}
        given |= {"share_prefixes": share, "lora": {"rank": 2} if who == "base" else None}
        config, batch = ModelConfig.model_validate(given), make_batch(1)
        torch.manual_seed(0)
        models = Models(Policy(config, OptimizerConfig()), Algorithm(AlgorithmConfig()))
        model: Any = models.policy.model
        if who == "reference":
            models.reference = reference = Policy(config)
            model = reference.model
        if who == "critic":
            models.critic = critic = Critic(config, OptimizerConfig())
            torch.nn.init.constant_(critic.module.head.weight, 0.1)
            model = critic.module.model
        counts: list[int] = []
        model.get_decoder().register_forward_pre_hook(
            lambda _module, _args, given, counts=counts: counts.append(given["input_ids"].numel()),
            with_kwargs=True,
        )
        found.append((scored(models, who, batch), sum(counts)))
    (scores, computed), (alone, rows) = found
    tree = Forest.of(batch, range(len(batch.sequences))).tokens
    assert computed == tree < rows == batch.input_tokens
    torch.testing.assert_close(scores, alone, atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_nothing_is_kept_after_the_passes(checkpoint: Path, dtype: str) -> None:
    """Of what pieces keep, only what later ones read is in memory, on the device or the host."""
    config = ModelConfig.model_validate(
        {"path": checkpoint, "max_micro_batch_tokens": PIECES, "compute_dtype": dtype}
    )
    policy, batch = Policy(config, OptimizerConfig(lr=1e-3)), make_batch(4)
    loss = Algorithm(AlgorithmConfig(prox="reuse"))
    loss.compute_advantages(batch)
    micros, sizes = policy.pack(batch), [0]
    kept = next(micro.piece.kept for micro in micros if micro.piece)
    for micro in micros:
        policy.forward_backward(micro, batch, loss.loss(batch), temperature=1.0)
        sizes.append(kept.size)
        waiting = set(kept.tensors)
        assert micro.piece is None or (micro.piece.number in waiting) == micro.reads_only
    assert max(sizes) > sizes[-1] == 0


@pytest.mark.parametrize("kind", ["checkpoint", "mixture"])
@pytest.mark.parametrize("gib", [0.0, 2e-6])
def test_what_is_kept_on_the_host_changes_nothing(
    kind: str, gib: float, request: pytest.FixtureRequest
) -> None:
    path = request.getfixturevalue(kind)
    way = {"max_micro_batch_tokens": PIECES}
    expected = trained(path, make_batch(1), way, ALGORITHM)
    assert_equal(trained(path, make_batch(1), way | {"prefix_gib": gib}, ALGORITHM), expected)


@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_what_is_kept_beside_the_weights_stays_within_its_room(
    checkpoint: Path, share: float
) -> None:
    def passes(room: int | None) -> tuple[list[int], int]:
        """The bytes on the device after each pass, with the gradients, and how many tensors are in
        the machine's memory."""
        gib = None if room is None else room / 2**30
        given = {"path": checkpoint, "max_micro_batch_tokens": PIECES, "prefix_gib": gib}
        policy = Policy(ModelConfig.model_validate(given), OptimizerConfig(lr=1e-3))
        batch, loss = make_batch(4), Algorithm(AlgorithmConfig(prox="reuse"))
        loss.compute_advantages(batch)
        micros, sizes, spilled = policy.pack(batch), [0], set()
        for micro in micros:
            policy.forward_backward(micro, batch, loss.loss(batch), temperature=1.0)
            if micro.piece is not None:
                layers = [n for each in micro.piece.kept.tensors.values() for n in each.values()]
                tensors = [each for layer in layers for each in layer]
                here = sum(2 * each.value.nbytes for each in tensors if not each.spilled)
                assert micro.piece.kept.on_device == here
                spilled |= {id(each) for each in tensors if each.spilled}
                sizes.append(here)
        return sizes, len(spilled)

    whole, none = passes(None)
    room = int(share * max(whole))
    sizes, spilled = passes(room)
    assert sizes[-1] == none == 0
    assert max(sizes) <= room
    assert (spilled == 0) is (share == 1)
    assert (max(sizes) > 0) is (share > 0)
