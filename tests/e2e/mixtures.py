"""Tiny Qwen3-MoE checkpoints with the starter model's tokenizer."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from tests.pages import ROOT
from trainer.policy.proof_on_copy import randomize

STARTER = ROOT / "examples/quickstart/model"


def random_mixture(folder: Path) -> Path:
    """Random weights, with as many experts as Qwen3-30B-A3B: 128, of which 8 compute a token.

    The routers are scaled as those of a new model (a standard deviation of 0.02), and the experts
    so that their mean of 8 is as large as the rest of the residual stream.
    """
    torch.manual_seed(0)
    config = _config(
        hidden_size=256, head_dim=64, num_hidden_layers=4, moe_intermediate_size=32,
        num_experts=128, num_experts_per_tok=8, layer_types=None,
    )  # fmt: skip
    model = Qwen3MoeForCausalLM(config)
    randomize(model)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight *= 0.3 if "mlp.gate" in name else 3.0 if "down_proj" in name else 1.0
            weight.copy_(weight.bfloat16())
    return _save(model, folder)


def upcycled_starter(folder: Path) -> Path:
    """The starter model with 8 experts instead of each dense layer, of which 2 compute a token.
    Each is a copy of the dense layer with some noise, so that the model can still do its task."""
    torch.manual_seed(0)
    dense = AutoModelForCausalLM.from_pretrained(STARTER)
    width = dense.config.intermediate_size
    model = Qwen3MoeForCausalLM(
        _config(moe_intermediate_size=width, num_experts=8, num_experts_per_tok=2)
    )
    model.load_state_dict(dense.state_dict(), strict=False)
    with torch.no_grad():
        for layer, old in zip(model.model.layers, dense.model.layers, strict=True):
            block: Any = layer.mlp
            both = torch.cat([old.mlp.gate_proj.weight, old.mlp.up_proj.weight])
            for experts, weight in (
                (block.experts.gate_up_proj, both),
                (block.experts.down_proj, old.mlp.down_proj.weight),
            ):
                experts.copy_(weight + 0.1 * weight.std() * torch.randn_like(experts))
            block.gate.weight.copy_(0.02 * torch.randn_like(block.gate.weight))
    return _save(model, folder)


def _config(**changes: Any) -> Any:
    settings = AutoModelForCausalLM.from_pretrained(STARTER).config.to_dict()
    for name in ("architectures", "model_type", "layer_types", "max_window_layers"):
        settings.pop(name)
    return Qwen3MoeConfig(**settings | {"norm_topk_prob": True} | changes)


def _save(model: Any, folder: Path) -> Path:
    model.save_pretrained(folder)
    for file in STARTER.iterdir():
        if "token" in file.name or "template" in file.name or "generation" in file.name:
            shutil.copy(file, folder)
    return folder
