"""The checkpoint's shape and its Hugging Face folder."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM


@dataclass(frozen=True)
class Shape:
    """Size of the model. The default has about a million parameters."""

    vocab_size: int = 1024
    hidden_size: int = 128
    layers: int = 3
    heads: int = 4
    context_tokens: int = 2048


# vLLM's CPU attention has kernels for multiples of 32.
_HEAD_SIZE = 32


def new_model(shape: Shape, seed: int) -> Qwen3ForCausalLM:
    """A randomly initialised model in fp32."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=3 * shape.hidden_size,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads // 2,
        head_dim=_HEAD_SIZE,
        max_position_embeddings=shape.context_tokens,
        tie_word_embeddings=True,
        rope_theta=10_000.0,
        attn_implementation="sdpa",
    )
    return Qwen3ForCausalLM(config)


def save_model(model: Qwen3ForCausalLM, folder: Path, *, end_of_turn: int, padding: int) -> None:
    """Writes config.json, generation_config.json and model.safetensors."""
    model.config.eos_token_id = end_of_turn
    model.config.pad_token_id = padding
    model.config.dtype = "float32"
    model.generation_config.eos_token_id = [end_of_turn, padding]
    model.generation_config.pad_token_id = padding
    model.save_pretrained(folder)
    generation = json.loads((folder / "generation_config.json").read_text(encoding="utf-8"))
    # Engines sample at the model's own temperature unless a request sets another.
    (folder / "generation_config.json").write_text(
        json.dumps({**generation, "do_sample": True, "temperature": 1.0}, indent=2) + "\n",
        encoding="utf-8",
    )
