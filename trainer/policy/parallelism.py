"""How the ranks of the trainer divide a micro-batch and the model among them."""

from __future__ import annotations

from dataclasses import dataclass


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
