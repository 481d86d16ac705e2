"""Replayed routing equals a router that is given its experts, packed and as a tree."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import linear, log_softmax
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from proxy.records import Ids
from proxy.records.expert_rows import Routing
from tests.trainer.policy.architectures import ARCHITECTURES
from tests.trainer.policy.forked_ranks import run_ranks
from tests.trainer.policy.test_policy import backward, gradients, make_batch, weighted_sum
from trainer.batch import Batch
from trainer.errors import ConfigError, TrainingError
from trainer.extras.experts.router_replay import check_replay, replayed_share
from trainer.extras.experts.routing_mismatch import routing_metrics
from trainer.learning.models import Models
from trainer.optimizer_config import OptimizerConfig
from trainer.policy.model_config import ModelConfig
from trainer.policy.parallel import Ranks
from trainer.policy.policy import Policy
from trainer.policy.proof_on_copy import randomize
from trainer.policy.shrink import shrunk

LAYERS, CHOSEN, EXPERTS = 2, 3, 8
MIXTURES = (
    *("qwen3_moe", "qwen3_next", "qwen3_5_moe", "mixtral", "gpt_oss", "glm4_moe", "deepseek_v3"),
    *("granitemoe", "minimax_m2", "mimo_v2_flash"),
)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny Qwen3-MoE with random weights."""
    folder = tmp_path_factory.mktemp("mixture")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        shrunk(CONFIG_MAPPING["qwen3_moe"](norm_topk_prob=True))
    )
    randomize(model)
    model.save_pretrained(folder)
    return folder


def recorded(ids: Ids) -> Routing:
    """Rows that depend on position and id, so that equal prefixes have equal ones. Every fourth
    token has none."""
    position = np.arange(len(ids))
    first = (position * 7 + ids * 13)[:, None] + np.arange(LAYERS) * 5
    rows = (first[:, :, None] + np.array([0, 3, 6])) % EXPERTS
    return Routing(rows.astype(np.uint8), position % 4 != 1)


def routed_batch(seed: int = 0) -> Batch:
    batch = make_batch(seed)
    return replace(batch, routing=tuple(recorded(ids) for ids in batch.sequences))


def policy_of(folder: Path, *, ranks: Ranks | None = None, **changes: object) -> Policy:
    given = {"path": folder, "max_micro_batch_tokens": 96, "router_replay": "replay"} | changes
    config = ModelConfig.model_validate(given)
    return Policy(config, OptimizerConfig(lr=1e-2, eps=1e-2), ranks=ranks)


def given_experts(gate: Any, layer: int, routing: Routing) -> Any:
    """The router's formula with given experts, written down from the paper."""

    def forward(hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = linear(hidden.reshape(-1, hidden.shape[-1]), gate.weight)
        own = logits.argsort(descending=True)[:, :CHOSEN]
        rows = torch.as_tensor(routing.experts[:, layer].astype(np.int64))
        experts = torch.where(torch.as_tensor(routing.known)[:, None], rows, own)
        weights = logits.gather(-1, experts).softmax(-1)  # of the chosen ones: norm_topk_prob
        return logits, weights, experts

    return forward


def by_hand(folder: Path, batch: Batch) -> tuple[Any, Tensor]:
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    assert model.config.norm_topk_prob
    rows = []
    for index, (ids, routing) in enumerate(zip(batch.sequences, batch.routing, strict=True)):
        assert routing is not None
        for number, layer in enumerate(model.model.layers):
            layer.mlp.gate.forward = given_experts(layer.mlp.gate, number, routing)
        logits = model(torch.as_tensor(ids.astype(np.int64))[None]).logits[0]
        here = batch.sequence == index
        at = log_softmax(logits, -1)[batch.position[here] - 1]
        rows.append(at.gather(-1, batch.ids[here][:, None])[:, 0])
    return model, torch.cat(rows)


@pytest.mark.parametrize(
    "how",
    [
        {"share_prefixes": False},
        {"share_prefixes": True},
        {"share_prefixes": True, "gradient_checkpointing": True},
    ],
    ids=["packed", "tree", "tree, checkpointed"],
)
def test_replay_equals_a_router_with_given_experts(mixture: Path, how: dict[str, Any]) -> None:
    batch = routed_batch()
    model, expected = by_hand(mixture, batch)
    policy = policy_of(mixture, **how)
    scores = policy.compute_logprobs(batch, temperature=1.0)
    torch.testing.assert_close(scores.logprobs, expected.detach(), atol=2e-5, rtol=1e-4)
    own = policy.compute_logprobs(batch, temperature=1.0, replay=False).logprobs
    assert float((own - expected.detach()).abs().max()) > 1e-2

    loss = weighted_sum(batch)
    loss(expected, expected, torch.arange(batch.num_tokens)).losses.sum().backward()
    backward(policy, batch, loss)
    ours, theirs = gradients(policy.model), gradients(model)
    assert float(theirs["model.layers.0.mlp.gate.weight"].abs().max()) > 1e-3
    for name, gradient in theirs.items():
        torch.testing.assert_close(ours[name], gradient, atol=2e-4, rtol=1e-3, msg=name)


def test_policy_without_replay_ignores_recorded_rows(mixture: Path) -> None:
    batch = routed_batch()
    plain = policy_of(mixture, router_replay="off")
    scores = plain.compute_logprobs(batch, temperature=1.0).logprobs
    batch.routing = ()
    assert torch.equal(plain.compute_logprobs(batch, temperature=1.0).logprobs, scores)
    replaying = policy_of(mixture)
    assert torch.equal(replaying.compute_logprobs(batch, temperature=1.0).logprobs, scores)


def test_mismatch_is_measured_with_the_engines_routing_and_without(mixture: Path) -> None:
    batch = routed_batch()
    policy = policy_of(mixture, max_micro_batch_tokens=4096)
    batch.logprobs = policy.compute_logprobs(batch, temperature=1.0).logprobs + 0.25
    own = policy.compute_logprobs(batch, temperature=1.0, replay=False).logprobs
    metrics = routing_metrics(Models(policy, None), batch, 1.0)  # type: ignore[arg-type]
    assert metrics["mismatch/with_replay_abs_mean"] == pytest.approx(0.25, rel=1e-4)
    without = float((own - batch.logprobs).abs().mean())
    assert metrics["mismatch/without_replay_abs_mean"] == pytest.approx(without, rel=1e-4)
    assert metrics["mismatch/replayed_tokens"] == replayed_share(batch) < 1


def test_replay_without_any_recorded_row_ends_the_run(mixture: Path) -> None:
    models = Models(policy_of(mixture), None)  # type: ignore[arg-type]
    with pytest.raises(TrainingError, match="start vLLM with --enable-return-routed-experts"):
        routing_metrics(models, make_batch(0), 1.0)


@pytest.mark.parametrize("shape", [(3, 3), (2, 4)])
def test_rows_of_another_model_are_refused(mixture: Path, shape: tuple[int, int]) -> None:
    batch = make_batch(0)
    batch.routing = tuple(
        Routing(np.zeros((len(ids), *shape), np.uint8), np.ones(len(ids), np.bool_))
        for ids in batch.sequences
    )
    with pytest.raises(TrainingError, match="the engine must serve the model that is trained"):
        policy_of(mixture).compute_logprobs(batch, temperature=1.0)


@pytest.mark.parametrize("kind", MIXTURES)
def test_every_mixture_of_the_table_can_replay(kind: str) -> None:
    (settings,) = [each.settings() for each in ARCHITECTURES if each.kind == kind]
    check_replay(settings, Path("model"))


def test_model_without_experts_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"llama models cannot replay .*: they have no experts"):
        check_replay(CONFIG_MAPPING["llama"](), Path("model"))


def test_router_that_does_not_choose_the_highest_scores_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

    def forward(self: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = linear(hidden.reshape(-1, hidden.shape[-1]), self.weight)
        experts = logits.argsort(descending=True)[:, : self.top_k]
        return logits, logits.gather(-1, experts).softmax(-1), experts

    monkeypatch.setattr(Qwen3MoeTopKRouter, "forward", forward)
    with pytest.raises(ConfigError, match="the experts of layer 0 are not chosen by the highest"):
        check_replay(CONFIG_MAPPING["qwen3_moe"](), Path("model"))


def trained(folder: Path, ranks: Ranks) -> tuple[Tensor, dict[str, Tensor]]:
    batch = routed_batch(1)
    policy = policy_of(folder, ranks=ranks, gradient_checkpointing=True, router_aux_loss=0.5)
    scores = policy.compute_logprobs(batch, temperature=1.0).logprobs
    backward(policy, batch, weighted_sum(batch))
    policy.step()
    return scores, dict(policy.named_hf_parameters())


def worker(rank: int, checkpoint: Path, folder: Path) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    result = trained(checkpoint, Ranks.of_process_group("cpu"))
    if rank == 0:
        torch.save(result, folder / "result.pt")
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_processes_replay_like_one(mixture: Path, tmp_path: Path) -> None:
    run_ranks(worker, mixture, tmp_path, ranks=2)
    scores, weights = torch.load(tmp_path / "result.pt")
    expected_scores, expected = trained(mixture, Ranks())
    torch.testing.assert_close(scores, expected_scores, atol=1e-4, rtol=1e-3)
    for name, weight in expected.items():
        torch.testing.assert_close(weights[name], weight, atol=1e-4, rtol=1e-3, msg=name)
