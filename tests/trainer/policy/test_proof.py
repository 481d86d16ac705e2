"""The proof of an architecture finds faults of every part and names the layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from trainer.errors import ConfigError
from trainer.policy import attention, proof, proof_on_copy
from trainer.policy.mask import AttentionMask
from trainer.policy.proof_on_copy import Differences
from trainer.policy.shrink import WINDOW, shrunk


def settings(kind: str, **changes: Any) -> Any:
    """The published default configuration of that type."""
    return CONFIG_MAPPING[kind](**changes)


@pytest.fixture(autouse=True)
def nothing_proven(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize(
    ("kind", "kinds"),
    [
        ("deepseek_v3", [False, False, False, True]),
        ("glm4_moe", [False, True]),
        ("qwen3_moe", [True, True]),
    ],
)
def test_shrunk_copy_has_every_kind_of_layer(kind: str, kinds: list[bool]) -> None:
    """True: a layer of experts."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(shrunk(settings(kind)))
    layers = model.get_decoder().layers
    assert [hasattr(layer.mlp, "experts") for layer in layers] == kinds
    assert sum(p.numel() for p in model.parameters()) < 2_000_000


@pytest.mark.parametrize("kind", ["kimi_linear", "qwen3_next", "olmo_hybrid"])
def test_shrunk_copy_of_linear_layers_is_small(kind: str) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(shrunk(settings(kind)))
    assert sum(p.numel() for p in model.parameters()) < 1_000_000


def test_shrunk_copy_keeps_window_layers_shares_and_formulas() -> None:
    small = shrunk(settings("gemma3_text"))
    assert small.layer_types == ["sliding_attention"] * 5 + ["full_attention"]
    assert small.sliding_window == WINDOW
    assert small.query_pre_attn_scalar == settings("gemma3_text").query_pre_attn_scalar
    assert small.head_dim == settings("gemma3_text").head_dim


def test_layer_whose_window_is_not_computed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def whole(
        query: Tensor, key: Tensor, value: Tensor, mask: AttentionMask, *args: Any, **kw: Any
    ) -> Any:
        return real(query, key, value, AttentionMask(mask.layout), *args, **kw)

    real = attention.attend
    monkeypatch.setattr(attention, "attend", whole)
    found = proof_on_copy.find_differences(shrunk(settings("gemma3_text"))).whole
    assert found is not None
    assert found.startswith("layer 0 (sliding_attention) differs from its own by")
    assert found.endswith("when it is computed packed")


def test_fault_that_only_trees_have_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def flat(
        query: Tensor, key: Tensor, value: Tensor, mask: AttentionMask, *args: Any, **kw: Any
    ) -> Any:
        """Attends from each path's own tokens only."""
        starts = [start for start, _, _ in mask.layout.runs]
        ends = torch.tensor([*starts[1:], len(mask.layout.ends)])
        own = ends[torch.bucketize(torch.arange(len(mask.layout.ends)), ends, right=True)]
        return real(query, key, value, AttentionMask(type(mask.layout)(own, 99)), *args, **kw)

    real = attention.attend
    monkeypatch.setattr(attention, "attend", flat)
    found = proof_on_copy.find_differences(shrunk(settings("qwen3"))).whole
    assert found is not None
    assert found.startswith("layer 0")
    assert found.endswith("as a tree")


def test_wrong_gradient_is_found_where_the_forward_pass_is_right(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def halved(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kw: Any) -> Any:
        return real(query, key / 2 + key.detach() / 2, value, *args, **kw)

    real = attention.attend
    monkeypatch.setattr(attention, "attend", halved)
    found = proof_on_copy.find_differences(shrunk(settings("qwen3"))).whole
    assert found is not None
    assert found.startswith("the gradient of model.")
    assert "when it is computed packed" in found


def test_proof_is_kept_until_the_configuration_changes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    proven: list[Any] = []

    def find(small: Any) -> Differences:
        proven.append(small)
        return Differences("layer 0 differs" if small.rms_norm_eps == 1.0 else None, None)

    monkeypatch.setattr(proof_on_copy, "find_differences", find)
    for _ in range(2):
        proof.prove(settings("qwen3"), tmp_path)
    assert len(proven) == 1
    proof.prove(settings("qwen3", rms_norm_eps=1e-5), tmp_path)
    assert len(proven) == 2
    for _ in range(2):  # a failure is not kept
        with pytest.raises(ConfigError, match="qwen3 models are not supported: layer 0 differs"):
            proof.prove(settings("qwen3", rms_norm_eps=1.0), tmp_path)
    assert len(proven) == 4


def test_proof_does_not_change_the_random_numbers_of_the_run() -> None:
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    proof_on_copy.find_differences(shrunk(settings("qwen3")))
    assert torch.equal(torch.rand(2), expected)
