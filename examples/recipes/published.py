"""The published sizes of the recipes' models, from their `config.json`, without their weights."""

from __future__ import annotations

from typing import Any

from transformers import Qwen3_5Config, Qwen3Config, Qwen3VLConfig


def qwen3_8b() -> Qwen3Config:
    """Qwen/Qwen3-8B."""
    return Qwen3Config(
        architectures=["Qwen3ForCausalLM"],
        hidden_size=4096,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        intermediate_size=12288,
        vocab_size=151936,
        max_position_embeddings=40960,
        rope_theta=1_000_000.0,
        tie_word_embeddings=False,
    )


def qwen3_vl_4b() -> Qwen3VLConfig:
    """Qwen/Qwen3-VL-4B-Instruct, which reads images."""
    rope = {"rope_type": "default", "rope_theta": 5_000_000.0, "mrope_interleaved": True}
    text: dict[str, Any] = {
        "hidden_size": 2560,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 9728,
        "vocab_size": 151936,
        "max_position_embeddings": 262144,
        "rope_parameters": {**rope, "mrope_section": [24, 20, 20]},
        "tie_word_embeddings": True,
    }
    tower: dict[str, Any] = {
        "depth": 24,
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_heads": 16,
        "num_position_embeddings": 2304,
        "out_hidden_size": 2560,
        "deepstack_visual_indexes": [5, 11, 17],
    }
    return Qwen3VLConfig(
        architectures=["Qwen3VLForConditionalGeneration"],
        text_config=text,
        vision_config=tower,
        tie_word_embeddings=True,
    )


def qwen3_5_4b() -> Qwen3_5Config:
    """Qwen/Qwen3.5-4B: three layers of Gated DeltaNet, then one of attention; and a vision
    tower."""
    text: dict[str, Any] = {
        "hidden_size": 2560,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "intermediate_size": 9216,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "vocab_size": 248320,
        "max_position_embeddings": 262144,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000_000.0,
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
            "partial_rotary_factor": 0.25,
        },
        "tie_word_embeddings": True,
    }
    return Qwen3_5Config(
        architectures=["Qwen3_5ForConditionalGeneration"],
        text_config=text,
        vision_config={"depth": 24, "hidden_size": 1024, "out_hidden_size": 2560},
        tie_word_embeddings=True,
    )
