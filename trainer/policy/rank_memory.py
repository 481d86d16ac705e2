"""The memory of one rank, by what it is for; `memory.py` measures it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

GIB = 2**30


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Memory of one rank in bytes, by what it is for.

    Example: RankMemory(weights=…, gradients=…, moments=…, gathered=0, passes=…).total
    """

    weights: int
    """Weights, or this rank's shard of them, and frozen models."""
    gradients: int
    moments: int
    """Optimizer state."""
    gathered: int
    """Weights of two layers and of the embeddings, which FSDP2 gathers while they compute."""
    passes: int | None
    """Activations of a forward and backward pass over the largest micro-batch; None: unknown,
    because the shapes in the model's code depend on values."""
    longest_prefix: int = 0
    """Keys, values and states of a prefix as long as the longest sequence, which passes over a tree
    in pieces hand on, and their gradients."""
    prefix_room: int | None = None
    """The most of it that is on the GPU, the rest in the machine's memory; None: all."""
    piece: int = 0
    """Activations of a pass over a piece of such a tree, which joins the prefix to its own keys and
    values in each layer."""
    lacks_fla: bool = False
    """Whether the activations are more because fla, whose kernels the model's linear layers use on
    a GPU, is not installed."""

    @property
    def resident(self) -> int:
        """What stays between the steps."""
        return self.weights + self.moments

    @property
    def total(self) -> int:
        """The peak of a step, or the known part of it."""
        passes = max(self.passes or 0, self.in_pieces)
        return self.resident + self.gradients + self.gathered + passes

    @property
    def kept_prefix(self) -> int:
        """What of the longest prefix is on the GPU."""
        room = self.prefix_room
        return self.longest_prefix if room is None else min(room, self.longest_prefix)

    @property
    def in_pieces(self) -> int:
        """The most that a pass over a piece of a tree needs in place of `passes`: for a batch whose
        sequences all share a prefix as long as the longest. 0: no tree is computed in pieces."""
        return self.piece + self.kept_prefix if self.longest_prefix else 0

    def parts(self) -> Mapping[str, int]:
        """The parts that are not 0, by name."""
        named = {
            "weights": self.weights,
            "gradients": self.gradients,
            "optimizer": self.moments,
            "gathered": self.gathered,
            "activations": self.passes,
            "prefixes": self.in_pieces - min(self.passes or 0, self.in_pieces),
        }
        return {name: size for name, size in named.items() if size is not None and size > 0}
