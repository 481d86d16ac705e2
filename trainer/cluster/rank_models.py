"""The models of a rank of the trainer, on its device."""

from __future__ import annotations

import torch

from trainer.cluster.ranks import device_of
from trainer.learning.models import Models, build_models
from trainer.policy.parallel import Ranks
from trainer.policy.parallelism import Seat
from trainer.policy.repeatable import make_repeatable
from trainer.ranks_config import RanksConfig


def models_of_rank(
    config: RanksConfig, seat: Seat | None = None, *, weights_of: Models | None = None
) -> Models:
    """Builds the models on the configured device. With a `seat`, waits until all ranks have joined
    and builds this rank's part of the models. With `weights_of`, the policy uses the same frozen
    weights as the policy of these models.

    Raises:
        ConfigError: a path is not a checkpoint of a causal model.
    """
    device = device_of(config.trainer.device, seat)
    ranks = Ranks() if seat is None else Ranks.join(seat, device, config.trainer.parallelism)
    if config.trainer.deterministic:
        make_repeatable()
    torch.manual_seed(config.trainer.seed)
    return build_models(
        config.model,
        config.optimizer,
        config.algorithm,
        device=device,
        ranks=ranks,
        batches=config.trainer.steps,
        weights_of=None if weights_of is None else weights_of.policy,
    )
