"""The ranks of the trainer: the seat of each, and how they divide a micro-batch and the model."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.errors import ConfigError

INSTALL = "uv pip install --no-deps nemo-automodel==0.7.0"
DENSE, MIXTURES = ("llama", "mistral", "qwen2", "qwen3"), ("qwen3_moe",)
"""Kinds of models (`model_type`) that tests compare with one rank."""
_HEADS = {"num_attention_heads": "attention heads", "linear_num_value_heads": "linear heads"}
"""Settings of `config.json` whose number of heads the ranks of a group divide among them."""


@dataclass(frozen=True, slots=True)
class Seat:
    """The place of a process among those that train together.

    Example: Seat(rank=1, size=2, rendezvous="file:///runs/a/ranks", local_rank=1)
    """

    rank: int
    size: int
    rendezvous: str
    """Address at which the processes meet: an `init_method` of torch.distributed."""
    local_rank: int
    """Index of the process's GPU on its machine."""


@dataclass(frozen=True, slots=True)
class Parallelism:
    """Example: 8 ranks with `Parallelism(tensor=2, pipeline=2)` are 2 groups, each of which
    computes its own micro-batches with a whole copy of the model. Group 0 has the ranks 0, 1, 4
    and 5: ranks 0 and 1 hold the first layers, ranks 4 and 5 the others.
    """

    context: int = 1
    """Number of consecutive ranks that hold each a part of a micro-batch's tokens."""
    tensor: int = 1
    """Number of consecutive ranks that hold each a part of every matrix."""
    pipeline: int = 1
    """Number of ranks that hold each a part of the layers."""
    expert: int = 1
    """Number of groups that hold each a part of the experts; they exchange tokens."""
    copies: int = 1
    """Number of copies of the weights, each of which is sharded over consecutive ranks (HSDP)."""

    @property
    def divides_model(self) -> bool:
        """Whether ranks hold different parts of the model while they compute."""
        return self.tensor * self.pipeline * self.expert > 1

    @property
    def together(self) -> int:
        """Number of ranks that compute each micro-batch together."""
        return self.context * self.tensor * self.pipeline

    def groups(self, ranks: int) -> int:
        """Number of groups of ranks that compute their micro-batches together."""
        return ranks // self.together

    def group_of(self, rank: int, ranks: int) -> int:
        """The group to which a rank belongs."""
        return rank % (ranks // self.pipeline) // (self.context * self.tensor)


def check_divided(settings: Any, divided: Parallelism, key: str, path: Path) -> None:
    """Checks that ranks can divide the model with this `config.json`; `key` is the setting that
    names the model.

    Raises:
        ConfigError: they cannot, or the package that does it is not installed.
    """
    if not divided.divides_model:
        return
    if importlib.util.find_spec("nemo_automodel") is None:
        raise ConfigError(
            "trainer.tensor_parallel, pipeline_parallel and expert_parallel need the package "
            f"nemo-automodel; run `{INSTALL}` (docs/scale.md)"
        )
    for refusal in _refusals(settings, divided):
        raise ConfigError(f"{key}: {path}: {refusal}")


def _refusals(settings: Any, divided: Parallelism) -> Iterator[str]:
    kind = settings.model_type
    for name, size, kinds in (
        ("tensor_parallel", divided.tensor, DENSE),
        ("pipeline_parallel", divided.pipeline, DENSE + MIXTURES),
        ("expert_parallel", divided.expert, MIXTURES),
    ):
        if size > 1 and kind not in kinds:
            yield (
                f"trainer.{name} is not supported for {kind} models, only for {', '.join(kinds)}; "
                f"use trainer.{name}=1"
            )
    if divided.pipeline > 1 and settings.tie_word_embeddings:
        yield (
            "trainer.pipeline_parallel is not supported for tied embeddings, which the first and "
            "the last stage would share; use trainer.tensor_parallel"
        )
    for name, size, counts in (
        (
            "tensor_parallel",
            divided.tensor,
            ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size"),
        ),
        ("expert_parallel", divided.expert, ("num_experts",)),
    ):
        for count in counts:
            if size > 1 and getattr(settings, count) % size:
                yield (
                    f"trainer.{name}={size} does not divide its {count} of "
                    f"{getattr(settings, count)}"
                )
    if settings.num_hidden_layers < divided.pipeline:
        yield (
            f"trainer.pipeline_parallel={divided.pipeline} is more than its "
            f"{settings.num_hidden_layers} layers"
        )


def check_heads(settings: Any, size: int, key: str, path: Path) -> None:
    """Raises ConfigError if `size` ranks cannot divide the heads of the model with this
    `config.json`; `key` is the setting that names the model."""
    text = settings.get_text_config()
    for name, title in _HEADS.items():
        heads = getattr(text, name, None)
        if isinstance(heads, int) and heads % size:
            fitting = [str(each) for each in range(1, size) if heads % each == 0]
            raise ConfigError(
                f"trainer.context_parallel={size}: {key}: {path} has {heads} {title}, which {size} "
                f"ranks cannot divide; use {' or '.join(fitting)}"
            )
