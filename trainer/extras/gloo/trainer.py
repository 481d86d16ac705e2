"""The trainer's side of the `gloo` backend: vLLM's own for `nccl`, with another process group, and
with an update in two parts. Workers receive the weights while they sample, and take them over when
they are asked to.

Invariant: weights count as sent only if the digests of all workers equal the trainer's.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import closing
from dataclasses import dataclass
from typing import ClassVar, Self

from vllm.distributed.weight_transfer.base import VLLMWeightSyncClient, WeightSource
from vllm.distributed.weight_transfer.nccl_engine import (
    NCCLTrainerInitInfo,
    NCCLTrainerWeightTransferEngine,
)

from trainer.extras.gloo.group import BUCKET_BYTES, Description, GlooGroup, Meeting, send
from trainer.weight_sync.dtypes import dtype_name

POLL_S = 0.05
"""Seconds between looks at who has arrived; torch's store has no wait that can be ended."""


@dataclass
class GlooTrainerInit(NCCLTrainerInitInfo):  # type: ignore[misc]
    """As for NCCL; `packed` has no effect."""

    backend: ClassVar[str] = "gloo"


class GlooTrainer(NCCLTrainerWeightTransferEngine):  # type: ignore[misc]
    """The trainer's side. Every rank iterates over the source; rank 0 sends."""

    init_info_cls = GlooTrainerInit
    digests: tuple[str, ...] = ()
    """Digest of the weights sent last, of the trainer and of each worker by rank."""
    unstaged: tuple[str, ...] = ()
    """Why workers have not staged them: they load them while sampling is paused."""

    @classmethod
    def trainer_init(
        cls,
        init_info: GlooTrainerInit,
        *,
        client: VLLMWeightSyncClient,
        source: WeightSource | None = None,
    ) -> Self:
        engine = cls(client=client, source=source, is_sender=init_info.is_sender)
        if not engine.is_sender:
            return engine
        address, size = init_info.master_address, init_info.world_size
        meeting = Meeting(address, size)
        joined = {
            "master_address": address,
            "master_port": meeting.port,
            "world_size": size,
            "bucket_bytes": BUCKET_BYTES,
        }
        # The engines answer when their workers have joined, which waits for this rank.
        with ThreadPoolExecutor(1) as pool, closing(meeting):
            asked = pool.submit(client.init_weight_transfer_engine, {**joined, "rank_offset": 1})
            while not meeting.is_complete and not asked.done():
                wait([asked], timeout=POLL_S)
            if not asked.done():
                engine.model_update_group = meeting.group()
            asked.result()
        return engine

    def stage_weights(self) -> None:
        """Sends the weights, and returns when every worker has staged them, or cannot.

        Raises:
            RuntimeError: an engine is lost, or received something else.
        """
        source = self.source
        assert source is not None
        meta = source.metadata()
        if not self.is_sender:
            self._broadcast(source, meta)  # only iterates
            return
        described: Description = {
            "names": [each.name for each in meta],
            "dtype_names": [dtype_name(each.dtype) for each in meta],
            "shapes": [list(each.shape) for each in meta],
        }
        self.client.init_weight_transfer_engine({"weights": described})
        group: GlooGroup = self.model_update_group
        self.digests = send(group, self._checked_iter(source, meta), BUCKET_BYTES)
        self.unstaged = tuple(filter(None, group.reasons("")))

    def send_weights(self) -> None:
        """Makes the engines take over the staged weights."""
        if self.is_sender:
            self.client.start_weight_update()
            self.client.update_weights({"digest": self.digests[0]})
            self.client.finish_weight_update()
