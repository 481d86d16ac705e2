"""What Liger's kernels would keep of a token and layer of Qwen3-1.7B, beside compiled layers.

Liger's kernels need Triton, and what they keep does not: here, norms, rotations and SwiGLU are
functions that keep the tensors which liger-kernel 0.8.5 passes to `save_for_backward`
(`ops/rms_norm.py`: input, weight, reciprocal deviations; `ops/rope.py`: cosines and sines;
`ops/swiglu.py`: gate and up), in the plan's own pass over tensors without memory.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn.functional import silu
from transformers import Qwen3Config
from transformers.models.qwen3 import modeling_qwen3 as qwen3

from trainer.policy.memory import kept_per_token
from trainer.policy.model_config import ModelConfig

QWEN3_1_7B = Qwen3Config(
    hidden_size=2048,
    intermediate_size=6144,
    num_hidden_layers=28,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=151936,
)
rotated = qwen3.apply_rotary_pos_emb


class _Norm(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        deviation = torch.rsqrt(x.float().square().mean(-1) + eps)
        ctx.save_for_backward(x, weight, deviation)
        return (x * deviation[..., None] * weight).to(x.dtype)


class _Rotation(Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
        ctx.save_for_backward(cos, sin)
        return rotated(q, k, cos, sin)


class _Gated(Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return silu(gate) * up


def _norm(self: Any, x: Tensor) -> Any:
    return _Norm.apply(x, self.weight, self.variance_epsilon)


def _rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *_: Any, **__: Any) -> Any:
    return _Rotation.apply(q, k, cos, sin)


def _mlp(self: Any, x: Tensor) -> Any:
    product = _Gated.apply(self.gate_proj(x), self.up_proj(x))
    return self.down_proj(product)


def main() -> None:
    program = "python -m benchmarks.kept_by_liger"
    argparse.ArgumentParser(prog=program, description=__doc__).parse_args()
    print("| weights | eager | Liger's kernels | compiled |\n|---|---|---|---|", flush=True)
    for weights in ("float32", "bfloat16"):
        given = {"path": Path("unused"), "compute_dtype": "bfloat16", "weights_dtype": weights}
        eager = ModelConfig.model_validate(given)
        compiled = ModelConfig.model_validate({**given, "compile_layers": True})
        kept = [kept_per_token(QWEN3_1_7B, eager)]
        with (
            patch.object(qwen3.Qwen3RMSNorm, "forward", _norm),
            patch.object(qwen3, "apply_rotary_pos_emb", _rotate),
            patch.object(qwen3.Qwen3MLP, "forward", _mlp),
        ):
            kept.append(kept_per_token(QWEN3_1_7B, eager))
        kept.append(kept_per_token(QWEN3_1_7B, compiled))
        print(f"| {weights} | {' | '.join(f'{each / 1024:.0f} KB' for each in kept)} |", flush=True)


if __name__ == "__main__":
    main()
