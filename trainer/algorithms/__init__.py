"""Algorithms as parts: each is one class with its formula, its settings and its source.

A part takes and returns tensors; it does not depend on models, state or ranks. Each kind of part
has a protocol and a registry in one module: `advantages`, `policy_losses`, `aggregation`, `kl`,
`correction`. `config.AlgorithmConfig` combines parts, `presets` holds the combinations of papers,
and `algorithm.Algorithm` applies them to a batch.

Shapes everywhere: `R` rollouts, `S` sequences, `N` trained tokens of a batch, `M` of a micro-batch.
"""

from trainer.algorithms.algorithm import Algorithm
from trainer.algorithms.config import AlgorithmConfig

__all__ = ["Algorithm", "AlgorithmConfig"]
