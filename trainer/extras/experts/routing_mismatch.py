"""How much of the engine's routing is replayed, and the difference to the engine both ways."""

from __future__ import annotations

from dataclasses import dataclass

from trainer.algorithms.token_loss import Metrics
from trainer.batch import Batch
from trainer.errors import TrainingError
from trainer.extras.experts.router_replay import replayed_share
from trainer.learning.models import Models


@dataclass(frozen=True, slots=True)
class CompareRouting:
    """Measures the difference to the engine with its routing and without; see `Policy`."""

    batch: Batch
    temperature: float

    def on(self, models: Models) -> Metrics:
        return models.policy.compare_routing(self.batch, temperature=self.temperature)


def routing_metrics(models: Models, batch: Batch, temperature: float) -> Metrics:
    """`mismatch/replayed_tokens`, the share of tokens with a recorded row, and the comparison of
    `Policy.compare_routing`; empty for a policy that replays nothing.

    Raises:
        TrainingError: the engine's routing is to be replayed, and no token has a recorded row.
    """
    policy = models.policy
    if not policy.replays:
        return {}
    share = replayed_share(batch)
    if not share:
        raise TrainingError(
            "model.router_replay=replay, but no token of the batch has recorded experts; start "
            "vLLM with --enable-return-routed-experts (engine.routed_experts), or set "
            "model.router_replay=off"
        )
    parts = policy.parts(batch)
    compared = models.deal([CompareRouting(part.batch, temperature) for part in parts])
    return {"mismatch/replayed_tokens": share} | compared
