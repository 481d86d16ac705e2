"""Which models the trainer's ranks fit on how many GPUs, by the estimate that a run makes before it
starts (`trainer.policy.memory`).

    python -m benchmarks.fits                         several GPUs, full training in bfloat16: the
                                                      smallest trainer.context_parallel
    python -m benchmarks.fits --page > docs/gpus.md   one GPU: how many layers are recomputed
"""

from __future__ import annotations

import argparse
from bisect import bisect_left
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from transformers import Qwen3Config, Qwen3MoeConfig

from trainer.cluster.device_plan import CONTEXT_BYTES, MARGIN_BYTES
from trainer.optimizer_config import OptimizerConfig
from trainer.policy.memory import rank_memory, recomputable
from trainer.policy.model_config import ModelConfig
from trainer.policy.rank_memory import GIB, RankMemory


def _dense(hidden: int, layers: int, heads: int, intermediate: int, *, tied: bool) -> Qwen3Config:
    return Qwen3Config(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=128,
        intermediate_size=intermediate,
        vocab_size=151936,
        tie_word_embeddings=tied,
        max_position_embeddings=40960,
    )


MODELS: Mapping[str, Any] = MappingProxyType(
    {
        "Qwen3-0.6B": _dense(1024, 28, 16, 3072, tied=True),
        "Qwen3-1.7B": _dense(2048, 28, 16, 6144, tied=True),
        "Qwen3-4B": _dense(2560, 36, 32, 9728, tied=True),
        "Qwen3-8B": _dense(4096, 36, 32, 12288, tied=False),
        "Qwen3-14B": _dense(5120, 40, 40, 17408, tied=False),
        "Qwen3-32B": _dense(5120, 64, 64, 25600, tied=False),
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
SEVERAL_GPUS = ("Qwen3-8B", "Qwen3-32B", "Qwen3-30B-A3B")
CARDS: Mapping[str, int] = MappingProxyType({"24 GB": 24, "48 GB": 48, "80 GB": 79, "141 GB": 140})
"""Names of cards by their memory → what torch finds on them, in GiB."""
PAGE_TOKENS = 16_384
DASH = "\N{EN DASH}"
WAYS: Mapping[str, tuple[dict[str, Any], dict[str, Any]]] = MappingProxyType(
    {
        "all weights": ({}, {}),
        "all weights, in bfloat16, moments in the machine's memory": (
            {"weights_dtype": "bfloat16"},
            {"offload": True},
        ),
        "LoRA, rank 16": ({"lora": {"rank": 16}}, {}),
        "LoRA, rank 16, in bfloat16": ({"lora": {"rank": 16}, "weights_dtype": "bfloat16"}, {}),
    }
)
"""Ways to train → keys of the sections `model` and `optimizer`."""
PAGE = f"""# Which GPU for which model

Made by `python -m benchmarks.fits --page`, from the estimate that `agentic-train --check` prints
on a machine with GPUs. One GPU trains, in bfloat16 with AdamW, on sequences of up to
{PAGE_TOKENS:,} tokens, and another one samples. A cell says how many layers are recomputed in the
backward pass, which the plan chooses by itself; none is fastest. A dash: it does not fit; use more
GPUs (`trainer.ranks`) or shorter sequences.

No GPU has shown this table yet. It adds up every tensor that autograd keeps in a pass without
memory, {CONTEXT_BYTES / GIB:.2g} GiB for CUDA's context, and {MARGIN_BYTES / GIB:.2g} GiB for
nobody.

| model | trained | {" | ".join(CARDS)} |
|---|---|{"---|" * len(CARDS)}
"""
BELOW = """
An engine needs two bytes per weight, 2 GiB for itself, and its cache of keys and values. On one GPU
for both, `engine.sleep: true` gives the engine's memory to the trainer while it trains. With
`optimizer.offload` the machine needs 8 bytes of memory per trained weight.
"""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fits", description=__doc__)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(SEVERAL_GPUS))
    parser.add_argument("--tokens", type=int, nargs="+", default=[32768, 131072])
    parser.add_argument("--gpus", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--gib", type=int, default=80)
    parser.add_argument("--page", action="store_true", help="print docs/gpus.md")
    args = parser.parse_args()
    if args.page:
        print(page(), end="")
        return
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


def page() -> str:
    """What fits on one GPU, as Markdown."""
    rows = []
    for name, settings in MODELS.items():
        for way in WAYS:
            cells = [recomputed(settings, way, gib * GIB) for gib in CARDS.values()]
            rows.append(f"| {name} | {way} | {' | '.join(cells)} |\n")
    return PAGE + "".join(rows) + BELOW


def recomputed(settings: Any, way: str, memory: int) -> str:
    """The fewest layers that must be recomputed so that training fits: `none`, `12 of 28`, or a
    dash if it does not with all of them."""
    of_model, of_optimizer = WAYS[way]
    counts = [0, *recomputable(settings)]

    def fits(count: int) -> bool:
        model = ModelConfig(
            path=Path("unused"),
            compute_dtype="bfloat16",
            max_micro_batch_tokens=PAGE_TOKENS,
            gradient_checkpointing=count or False,
            **of_model,
        )
        optimizer = OptimizerConfig(**of_optimizer)
        found = rank_memory(
            settings, model, optimizer, ranks=1, longest=PAGE_TOKENS, gpu_bytes=memory
        )
        return _fits(found, memory)

    least = bisect_left(counts, True, key=fits)
    if least == len(counts):
        return DASH
    return "none" if least == 0 else f"{counts[least]} of {settings.num_hidden_layers}"


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
