"""A rank of a trainer that sends weights to engines: `python -m tests.e2e.gloo_trainer RANK STORE
MODEL`, with two FSDP2 ranks. Rank 0 reads an order per line and answers with a line, both JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from trainer.algorithms import AlgorithmConfig
from trainer.errors import WeightSyncError
from trainer.learning import steps
from trainer.learning.models import Models, build_models, follow
from trainer.optimizer_config import OptimizerConfig
from trainer.policy.model_config import ModelConfig
from trainer.policy.parallel import Ranks
from trainer.policy.policy import Policy
from trainer.weight_sync.control import EngineControl
from trainer.weight_sync.probe import probe_batch
from trainer.weight_sync.segment import Named, digest
from trainer.weight_sync.sync import WeightSync
from trainer.weight_sync.transports import VllmTransport

RANKS = 2
TOLERANCE = 1e-3


@dataclass(frozen=True, slots=True)
class Disturb:
    """Changes the shards of every rank."""

    seed: int

    def on(self, models: Models) -> None:
        generator = torch.Generator().manual_seed(RANKS * self.seed + models.policy.ranks.rank)
        assert isinstance(models.policy, Policy)
        modules = models.policy.scorer.modules()
        for module in (each for each in modules if isinstance(each, FSDPModule)):
            module.reshard()  # FSDP keeps some layers whole after a forward pass
        with torch.no_grad():
            for parameter in models.policy.model.parameters():
                assert isinstance(parameter, DTensor)
                shard = parameter.to_local()
                shard += 0.05 * torch.randn(shard.shape, generator=generator)


class Trainer:
    """What rank 0 does for an order."""

    def __init__(self, models: Models, ids: Sequence[int]) -> None:
        self._models, self._ids = models, ids
        self._sync: WeightSync | None = None

    def connect(self, urls: Sequence[str]) -> None:
        if self._sync is not None:
            self._sync.close()
        self._sync = None
        self._sync = WeightSync(EngineControl(urls), "gloo")

    def push(self, version: int, stop_at: int | None) -> dict[str, Any]:
        """Sends the weights; before tensor `stop_at` it waits for a line."""
        sync, models = self._sync, self._models
        assert sync is not None
        assert isinstance(sync.transport, VllmTransport)
        with closing(models.weights()) as weights:
            sync.push(_stopping(weights, stop_at), version, models.policy.hf_shapes)
        with closing(models.weights()) as weights:
            sent = digest((name, each.clone().contiguous()) for name, each in weights)
        return {
            "sent": sent,
            "digests": sync.transport.engine.digests,
            "difference": sync.verify(self._ids, self.scores(), TOLERANCE),
            "scores": self.scores(),
        }

    def scores(self) -> list[float]:
        found = steps.compute_logprobs(self._models, probe_batch(self._ids), temperature=1.0)
        return found.logprobs.tolist()

    def obey(self, order: dict[str, Any]) -> dict[str, Any]:
        if order.get("urls"):
            self.connect(order["urls"])
        if order.get("disturb") is not None:
            self._models.together(Disturb(order["disturb"]))
        return self.push(order["version"], order.get("stop_at"))


def _stopping(weights: Iterator[Named], stop_at: int | None) -> Iterator[Named]:
    for number, each in enumerate(weights):
        if number == stop_at:
            _say({"sending": number})
            sys.stdin.readline()
        yield each


def _say(answer: dict[str, Any]) -> None:
    print(json.dumps(answer), flush=True)


def main() -> None:
    rank, store, model = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=RANKS)
    ranks = Ranks.of_process_group("cpu")
    models = build_models(
        ModelConfig(path=model), OptimizerConfig(), AlgorithmConfig(), ranks=ranks
    )
    if rank:
        follow(models)
        return
    trainer = Trainer(models, json.loads(sys.argv[4]))
    for line in sys.stdin:
        try:
            _say(trainer.obey(json.loads(line)))
        except WeightSyncError as error:
            _say({"error": str(error)})
    models.finish()


if __name__ == "__main__":
    main()
