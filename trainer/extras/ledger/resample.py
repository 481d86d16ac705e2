"""Samples the recorded turns of a step again, and compares them with what was recorded.

Invariant: a turn that passes was sampled again from the weights of its version, with the same ids
and log-probabilities, bit for bit, together with other calls than in the run.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from agent_loop.records import Group
from proxy.engines.protocol import Chunk, Sampling
from proxy.engines.vllm import VllmEngine
from proxy.records import Turn, TurnStatus
from proxy.store import open_store
from proxy.store.protocol import Store
from proxy.token_tree.tree import TokenTree
from trainer.cluster.local import LocalCluster
from trainer.cluster.rank_zero import Connect, RankZero, SyncWeights
from trainer.errors import ConfigError
from trainer.extras.ledger.ledger import LedgerError
from trainer.extras.ledger.record import Record
from trainer.run.control import RunControl
from trainer.run.folder import RunFolder

SENT = ("temperature", "top_p", "top_k", "min_p", "seed", "structured")
"""The recorded parameters that decide what is sampled; `max_tokens` is what the turn has."""
SHOWN = 3


@dataclass
class SamplingEngine:
    """An engine that gets the weights of each step."""

    engine: VllmEngine
    url: str
    store: Store
    rank_zero: RankZero | None = None

    async def connect(self, rank_zero: RankZero) -> None:
        self.rank_zero = rank_zero
        await rank_zero.ask(Connect([self.url]))

    async def check(self, step: int, groups: Sequence[Group]) -> None:
        """Samples the turns of the step that the weights before it have sampled.

        Raises:
            LedgerError: one has other ids or log-probabilities; it names the first token.
        """
        assert self.rank_zero is not None
        await self.rank_zero.ask(SyncWeights())
        trials = [each.trial_id for group in groups for each in group.rollouts]
        checks = []
        for trial in trials:
            turns = await self.store.get_turns(trial)
            if any(turn.images for turn in turns):
                raise LedgerError(
                    f"step {step}: trial {trial} has images, which are not sampled again here; run "
                    "it without --engines, which computes the training alone"
                )
            tree = TokenTree(turns)
            checks += [
                self._turn(turn, tree.prompt(turn.parent, turn.shared_tokens, turn.prompt_ids))
                for turn in turns
                if turn.status is TurnStatus.DONE and len(turn.versions) == 1
            ]
        found = await asyncio.gather(*checks)
        if wrong := [each for each in found if each is not None]:
            shown = "; ".join(wrong[:SHOWN])
            raise LedgerError(f"step {step}: {len(wrong)} of {len(found)} turns differ: {shown}")
        print(f"step {step}: {len(found)} turns sampled again, with the same ids and probabilities")

    async def _turn(self, turn: Turn, prompt: np.ndarray) -> str | None:
        given = {name: turn.sampling[name] for name in SENT if name in turn.sampling}
        chunks: list[Chunk] = []
        await self.engine.generate(
            prompt,
            Sampling(max_tokens=len(turn.sampled_ids), **given),
            chunks.append,
            request_id=f"{turn.session_id}#{turn.index}",
            stream=False,
        )
        ids = np.array([each for chunk in chunks for each in chunk.ids], np.int32)
        logprobs = np.array([each for chunk in chunks for each in chunk.logprobs], np.float32)
        where = f"trial {turn.session_id}, turn {turn.index}"
        same = ids[: len(turn.sampled_ids)] == turn.sampled_ids[: len(ids)]
        if not same.all() or len(ids) != len(turn.sampled_ids):
            at = int(np.flatnonzero(~same)[0]) if not same.all() else min(len(ids), len(same))
            return f"{where}, token {at}: another id"
        if (differ := np.flatnonzero(logprobs != turn.logprobs)).size:
            return f"{where}, token {differ[0]}: another log-probability"
        return None


@asynccontextmanager
async def sampling_engine(record: Record) -> AsyncIterator[SamplingEngine]:
    """Starts an engine of the run's configuration.

    Raises:
        ConfigError: the run sampled from adapters.
    """
    config = record.config
    if config.model.policy:
        raise ConfigError("--engines: not supported for policies that are served as adapters")
    store = await open_store(str(record.folder.sessions), create=False)
    with tempfile.TemporaryDirectory(prefix="agentic-replay-") as name:
        scratch = RunFolder(Path(name))
        scratch.logs.mkdir()
        replica = LocalCluster(config, scratch, RunControl()).replica(0)
        try:
            await replica.start()
            engine = VllmEngine(replica.url)
            await engine.check()
            yield SamplingEngine(engine, replica.url, store)
            await engine.close()
        finally:
            await replica.stop()
            await store.close()
