"""The auxiliary loss of routers equals transformers' own, packed and as a tree."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from tests.trainer.policy.architectures import ARCHITECTURES
from tests.trainer.policy.test_policy import gradients, make_batch
from trainer.algorithms.token_loss import TokenLoss
from trainer.batch import Batch
from trainer.errors import ConfigError
from trainer.extras.experts.router_balance import RouterBalance, check_balance
from trainer.optimizer_config import OptimizerConfig
from trainer.policy.compiled_layers import compile_layers
from trainer.policy.model_config import ModelConfig
from trainer.policy.policy import Policy
from trainer.policy.proof_on_copy import randomize
from trainer.policy.shrink import shrunk
from trainer.rows.packing import pack

COEFFICIENT = 0.5
WITH_LOSS = (
    *("qwen3_moe", "qwen3_next", "qwen3_5_moe", "mixtral", "gpt_oss", "granitemoe", "minimax_m2"),
)


def save(kind: str, folder: Path) -> Path:
    (published,) = [each.settings() for each in ARCHITECTURES if each.kind == kind]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(shrunk(published))
    randomize(model)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny Qwen3-MoE with random weights."""
    return save("qwen3_moe", tmp_path_factory.mktemp("mixture"))


def policy_of(folder: Path, **changes: object) -> Policy:
    given = {"path": folder, "max_micro_batch_tokens": 1 << 16, "router_aux_loss": COEFFICIENT}
    return Policy(ModelConfig.model_validate(given | changes), OptimizerConfig(lr=1e-3))


def balance(policy: Policy, batch: Batch) -> float:
    """Adds the gradient of the auxiliary loss alone; returns the loss."""
    total = 0.0
    for micro in policy.pack(batch):
        found = policy.forward_backward(
            micro, batch, lambda logp, _entropy, _targets: TokenLoss(0 * logp, {}), temperature=1.0
        )
        total += found["router_aux_loss"]
    return total


def scores_of(model: Any, ids: Any) -> Tensor:
    """`[L, T, E]`, by transformers' own forward pass over the sequence alone."""
    output = model.model(torch.as_tensor(ids.astype(np.int64))[None], output_router_logits=True)
    return torch.stack(output.router_logits)


def assert_equal_gradients(policy: Policy, model: Any) -> None:
    ours, theirs = gradients(policy.model), gradients(model)
    assert max(float(g.abs().max()) for name, g in theirs.items() if "gate" in name) > 1e-3
    for name, gradient in theirs.items():
        torch.testing.assert_close(ours[name], gradient, atol=2e-5, rtol=1e-3, msg=name)


@pytest.mark.parametrize("kind", WITH_LOSS)
def test_loss_of_a_sequence_is_that_of_transformers(kind: str, tmp_path: Path) -> None:
    folder = save(kind, tmp_path / "model")
    batch = make_batch(0, segments=1)
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    policy = policy_of(folder)
    for index, ids in enumerate(batch.sequences):
        (micro,) = policy.pack(batch, [index])
        found = policy.forward_backward(
            micro, batch, lambda logp, _entropy, _targets: TokenLoss(logp, {}), temperature=1.0
        )
        path = torch.as_tensor(ids.astype(np.int64))[None]
        expected = model(path, output_router_logits=True).aux_loss
        assert found["router_aux_loss"] == pytest.approx(float(expected.detach()), rel=1e-5)
        assert found["router_aux_loss"] > 1


@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpointed"])
@pytest.mark.parametrize("share", [False, True], ids=["packed", "tree"])
def test_each_token_of_a_row_counts_once(mixture: Path, share: bool, checkpointing: bool) -> None:
    batch = make_batch(0)
    policy = policy_of(mixture, share_prefixes=share, gradient_checkpointing=checkpointing)
    (micro,) = policy.pack(batch)
    model = AutoModelForCausalLM.from_pretrained(mixture, attn_implementation="eager")
    columns: list[Tensor] = []
    seen = set[tuple[int, bytes]]()
    for index, ids in enumerate(batch.sequences):
        scores, group = scores_of(model, ids), int(batch.group[batch.sequence_rollout[index]])
        for end in range(1, len(ids) + 1):
            path = (group, ids[:end].tobytes())
            if not (share and path in seen):
                columns.append(scores[:, end - 1])
            seen.add(path)
    assert len(columns) == len(micro.ids)
    settings = model.config
    expected = load_balancing_loss_func(
        tuple(torch.stack(columns, 1)), settings.num_experts, settings.num_experts_per_tok
    )
    assert isinstance(expected, Tensor)
    assert balance(policy, batch) == pytest.approx(float(expected.detach()), rel=1e-5)
    (COEFFICIENT * expected).backward()
    assert_equal_gradients(policy, model)


def test_micro_batches_count_by_their_tokens_and_padding_not_at_all(mixture: Path) -> None:
    batch = make_batch(0)
    policy = policy_of(mixture, max_micro_batch_tokens=96)
    micros = policy.pack(batch)
    assert len(micros) > 2
    tokens = sum(len(micro.ids) for micro in micros)
    alone = policy_of(mixture, max_micro_batch_tokens=96)
    expected = 0.0
    for micro in micros:
        assert micro.share == len(micro.ids) / tokens
        with torch.no_grad():
            scored = alone.scorer(micro, batch.ids[micro.targets], 1.0)
        expected += float(scored.imbalance) * len(micro.ids) / tokens
    assert balance(policy, batch) == pytest.approx(expected, rel=1e-5)
    padded = pack(batch, max_tokens=96, share_prefixes=True, multiple_of=len(micros) + 1)
    shares = [micro.share for micro in padded]
    assert sum(shares) == pytest.approx(1)
    assert 0 in shares


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpointed"])
@pytest.mark.parametrize(
    "kind",
    [pytest.param(each, marks=pytest.mark.long if n else ()) for n, each in enumerate(WITH_LOSS)],
)
def test_compiled_layers_have_the_same_loss_without_further_graphs(
    kind: str, checkpointing: bool, tmp_path: Path
) -> None:
    folder, batch = save(kind, tmp_path / "model"), make_batch(0)
    graphs = 0

    def counting(graph: torch.fx.GraphModule, _inputs: list[Tensor]) -> Any:
        nonlocal graphs
        graphs += 1
        return graph.forward

    eager = policy_of(folder, gradient_checkpointing=checkpointing)
    expected, counts = balance(eager, batch), []
    for coefficient in (0, COEFFICIENT):
        torch._dynamo.reset()
        policy = policy_of(
            folder, router_aux_loss=coefficient, gradient_checkpointing=checkpointing
        )
        compile_layers(policy.model.get_decoder().layers, counting)
        policy.compute_logprobs(batch, temperature=1.0)
        for micro in policy.pack(batch):
            policy.forward_backward(
                micro, batch, lambda logp, _h, _t: TokenLoss(0 * logp, {}), temperature=1.0
            )
        counts.append(graphs)
    torch._dynamo.reset()
    assert counts[1] == 2 * counts[0]
    assert expected > 1
    for name, gradient in gradients(eager.model).items():
        torch.testing.assert_close(gradients(policy.model)[name], gradient, atol=2e-5, rtol=1e-3)


def test_passes_that_only_read_keep_no_scores(mixture: Path) -> None:
    policy = policy_of(mixture)
    policy.compute_logprobs(make_batch(0), temperature=1.0)
    assert isinstance(policy.scorer.balance, RouterBalance)
    assert policy.scorer.balance.routers
    assert not policy.scorer.balance.scores()


def test_scores_have_no_auxiliary_loss(mixture: Path) -> None:
    batch = make_batch(0)
    balanced = policy_of(mixture).compute_logprobs(batch, temperature=1.0)
    plain = policy_of(mixture, router_aux_loss=0).compute_logprobs(batch, temperature=1.0)
    assert torch.equal(balanced.logprobs, plain.logprobs)


@pytest.mark.parametrize("kind", ["llama", "glm4_moe", "deepseek_v3"])
def test_model_without_the_loss_is_refused_by_name(kind: str) -> None:
    with pytest.raises(ConfigError, match=f"no load-balancing loss for {kind} models"):
        check_balance(CONFIG_MAPPING[kind](), Path("model"))
