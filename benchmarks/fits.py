"""Which models the trainer's ranks fit on how many GPUs.

By the estimate that a run makes before it starts (`trainer.policy.memory`), for full training in
bfloat16 with AdamW and gradient checkpointing: the smallest `trainer.context_parallel` with which a
sequence of the given length fits, and the memory of a rank.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from transformers import Qwen3Config, Qwen3MoeConfig

from trainer.cluster.device_plan import CONTEXT_BYTES, MARGIN_BYTES
from trainer.optimizer_config import OptimizerConfig
from trainer.policy.memory import rank_memory
from trainer.policy.model_config import ModelConfig
from trainer.policy.rank_memory import GIB, RankMemory

MODELS: Mapping[str, Any] = MappingProxyType(
    {
        "Qwen3-8B": Qwen3Config(
            hidden_size=4096,
            num_hidden_layers=36,
            num_attention_heads=32,
            num_key_value_heads=8,
            head_dim=128,
            intermediate_size=12288,
            vocab_size=151936,
            tie_word_embeddings=False,
        ),
        "Qwen3-32B": Qwen3Config(
            hidden_size=5120,
            num_hidden_layers=64,
            num_attention_heads=64,
            num_key_value_heads=8,
            head_dim=128,
            intermediate_size=25600,
            vocab_size=151936,
            tie_word_embeddings=False,
        ),
        "Qwen3-30B-A3B": Qwen3MoeConfig(
            hidden_size=2048,
            num_hidden_layers=48,
            num_attention_heads=32,
            num_key_value_heads=4,
            head_dim=128,
            intermediate_size=6144,
            moe_intermediate_size=768,
            num_experts=128,
            num_experts_per_tok=8,
            vocab_size=151936,
            tie_word_embeddings=False,
        ),
    }
)
"""The published sizes."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fits", description=__doc__)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--tokens", type=int, nargs="+", default=[32768, 131072])
    parser.add_argument("--gpus", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--gib", type=int, default=80)
    args = parser.parse_args()
    print("| model | tokens | GPUs | context_parallel | GiB of a rank |\n|---|---|---|---|---|")
    for name in args.models:
        for tokens in args.tokens:
            for gpus in args.gpus:
                size, memory = smallest(MODELS[name], tokens, gpus, args.gib * GIB)
                parts = ", ".join(f"{k} {v / GIB:.1f}" for k, v in memory.parts().items())
                fits = str(size) if _fits(memory, args.gib * GIB) else f"does not fit ({size})"
                print(
                    f"| {name} | {tokens:,} | {gpus} | {fits} | {memory.total / GIB:.1f} ({parts})",
                    end=" |\n",
                    flush=True,
                )


def smallest(settings: Any, tokens: int, gpus: int, memory: int) -> tuple[int, RankMemory]:
    """The smallest number of ranks per micro-batch with which a rank fits, and the rank's memory;
    if there is none, the largest that divides GPUs and heads."""
    model = ModelConfig(
        path=Path("unused"),
        compute_dtype="bfloat16",
        max_micro_batch_tokens=tokens,
        gradient_checkpointing=True,
    )
    heads = settings.num_attention_heads
    sizes = [n for n in (1, 2, 4, 8, 16, 32, 64) if not (gpus % n or heads % n)]
    for size in sizes:
        found = rank_memory(settings, model, OptimizerConfig(), ranks=gpus, context_parallel=size)
        if _fits(found, memory):
            break
    return size, found


def _fits(found: RankMemory, memory: int) -> bool:
    return found.passes is not None and found.total + CONTEXT_BYTES + MARGIN_BYTES <= memory


if __name__ == "__main__":
    main()
