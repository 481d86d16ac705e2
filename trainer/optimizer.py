"""AdamW and its learning-rate schedule, from one configuration."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR


class OptimizerConfig(BaseModel):
    """Section `optimizer`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Literal["adamw", "adamw_8bit"] = "adamw"
    """`adamw_8bit` needs bitsandbytes (extra `gpu`)."""
    lr: float = Field(1e-6, gt=0)
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.0, ge=0)
    """On matrices only: norms and biases are not decayed."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """What follows the warm-up, down to `min_lr_ratio` at the last step."""
    warmup_steps: int = Field(0, ge=0)
    """Steps over which the learning rate rises linearly from 0."""
    min_lr_ratio: float = Field(0.0, ge=0, le=1)
    """Final learning rate over the peak, for `linear` and `cosine`."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Gradients are scaled down to this global norm."""


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> Optimizer:
    """The optimizer over the model's trainable parameters.

    Raises ValueError when `adamw_8bit` is asked for and bitsandbytes is not installed.
    """
    trainable = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in trainable if p.ndim <= 1], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if config.name == "adamw_8bit":
        return _adamw_8bit(groups, config)
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)


def _adamw_8bit(groups: Iterable[dict[str, object]], config: OptimizerConfig) -> Optimizer:
    try:
        from bitsandbytes.optim import AdamW8bit
    except ImportError as error:
        raise ValueError(
            "optimizer.name: adamw_8bit needs bitsandbytes; install it, or use adamw"
        ) from error
    optimizer: Optimizer = AdamW8bit(groups, lr=config.lr, betas=config.betas, eps=config.eps)
    return optimizer


def build_schedule(
    optimizer: Optimizer, config: OptimizerConfig, total_steps: int | None
) -> LambdaLR:
    """Warm-up, then the schedule down to `min_lr_ratio` at `total_steps`.

    Raises ValueError for a decaying schedule without `total_steps`.
    """
    if config.schedule != "constant" and total_steps is None:
        raise ValueError(f"optimizer.schedule: {config.schedule} needs the number of steps")

    def ratio(step: int) -> float:
        if step < config.warmup_steps:
            return (step + 1) / (config.warmup_steps + 1)
        if total_steps is None or config.schedule == "constant":
            return 1.0
        span = max(1, total_steps - config.warmup_steps)
        left = max(0.0, 1.0 - (step - config.warmup_steps) / span)
        shape = left if config.schedule == "linear" else (1 - math.cos(math.pi * left)) / 2
        return config.min_lr_ratio + (1 - config.min_lr_ratio) * shape

    return LambdaLR(optimizer, ratio)
