"""The algorithms as pure functions of flat columns, and the configuration that names them.

Every function takes what it needs as tensors and returns tensors: no model, no state, no ranks.
`config.AlgorithmConfig` puts the parts together, `presets` names the papers' combinations, and
`objective` applies them to a batch.

Shapes everywhere: `R` rollouts, `S` sequences, `N` trained tokens.
"""

from trainer.algorithms.algorithm import Algorithm
from trainer.algorithms.config import AlgorithmConfig

__all__ = ["Algorithm", "AlgorithmConfig"]
