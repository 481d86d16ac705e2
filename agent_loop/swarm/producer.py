"""The trainer's side of a swarm: its batches are what clients' episodes make full.

Invariant: a batch is asked for once; asking for the next one says that the last is trained, and so
does the end of a run whose last checkpoint has it. The rollouts are built from the recordings that
the server made durable when each episode ended.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import aiohttp
import numpy as np
import orjson

from agent_loop.credit import CreditSettings, assign_credit
from agent_loop.errors import AgentLoopError
from agent_loop.records import Group, Rollout, RolloutStatus, Segment, Task
from agent_loop.swarm.wire import BatchView, EpisodeView, TrainerHello, TrainerReady, Welcome
from agent_loop.trajectory import build_segments
from proxy.record_format import decode_record
from proxy.records import FinishReason, Reward, Turn

POLL_S = 30.0


class SwarmProducer:
    """Example: SwarmProducer("http://127.0.0.1:8100", trainer_key, hello)"""

    def __init__(
        self,
        url: str,
        trainer_key: str,
        hello: TrainerHello,
        credit: CreditSettings | None = None,
    ) -> None:
        self._url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {trainer_key}"}
        self._hello = hello
        self._credit = credit or CreditSettings()
        self._generation: int | None = None
        self._first_version = 0
        self._http: aiohttp.ClientSession | None = None
        self._batches = 0
        self._last: int | None = None
        """The server's number of the batch that was taken last, until it is said to be trained."""
        self._is_saved = False
        self.counts: Counter[str] = Counter()
        """Groups `kept`, over the run."""

    def start(self, version: int, state: Mapping[str, Any] | None = None) -> None:
        self._batches = int(state["batches"]) if state else 0

    async def next_batch(self, version: int) -> list[Group]:
        """The groups that met the stop rule, with their tokens.

        Raises:
            AgentLoopError: the swarm server is gone, or refuses.
        """
        if self._generation is None:
            body = await self._request("POST", "/trainer/hello", self._hello.model_dump())
            self._generation = Welcome.model_validate_json(body).generation
            self._first_version = version
        ready = TrainerReady(version=version, wait_s=POLL_S).model_dump()
        while not (body := await self._request("POST", "/trainer/next_batch", ready)):
            pass
        batch = BatchView.model_validate_json(body)
        self._batches += 1
        self._last, self._is_saved = batch.number, False
        self.counts["kept"] += len(batch.groups)
        return [
            await self._group(f"b{batch.number}-{number}", episodes)
            for number, episodes in enumerate(batch.groups)
        ]

    def set_version(self, version: int) -> None:
        """The server hears of it with the next call."""

    def state(self) -> dict[str, Any]:
        return {"batches": self._batches}

    def acknowledge(self, state: Mapping[str, Any]) -> None:
        """The next `next_batch`, or else `close`, tells the server."""
        self._is_saved = int(state["batches"]) == self._batches

    async def close(self) -> None:
        if self._last is not None and self._is_saved:
            with contextlib.suppress(AgentLoopError):  # it ends too: it keeps them
                await self._request("POST", "/trainer/trained", {"batch": self._last})
        if self._http is not None:
            await self._http.close()

    async def _group(self, group_id: str, episodes: list[EpisodeView]) -> Group:
        rollouts = [await self._rollout(episode) for episode in episodes]
        return Group(group_id, rollouts[0].task, rollouts)

    async def _rollout(self, episode: EpisodeView) -> Rollout:
        body = await self._request("GET", f"/trainer/records/{episode.episode_id}")
        session, turns = decode_record(body)
        of_turns = [
            Reward(f"end_episode.{turn}", value, turn=turn)
            for turn, value in episode.turn_rewards.items()
        ]
        posted = [*session.rewards, *of_turns]
        credit = assign_credit(turns, episode.reward, posted, self._credit)
        answered = [turn for turn in turns if turn.sampled]
        cut_short = bool(answered) and answered[-1].finish_reason is FinishReason.LENGTH
        return Rollout(
            trial_id=episode.episode_id,
            task=Task(str(episode.task_id), episode.metadata, episode.source),
            status=RolloutStatus.TRUNCATED if cut_short else RolloutStatus.DONE,
            reward=episode.reward,
            segments=self._segments(episode, turns, credit.untrained),
            reward_parts=episode.reward_parts,
            turn_returns=credit.returns,
            truncated_turns=_truncated(answered),
            num_turns=len(answered),
            forks=Counter(turn.fork_cause.value for turn in turns if turn.fork_cause),
            started_version=episode.version,
            error="its last answer reached the length limit" if cut_short else None,
            times_s={"total": (episode.ended_at or 0.0) - episode.claimed_at},
        )

    def _segments(
        self, episode: EpisodeView, turns: list[Turn], untrained: Collection[int]
    ) -> tuple[Segment, ...]:
        """An earlier trainer's versions are other weights than ours of the same number: all that
        is known of them is that they are older than ours."""
        segments = build_segments(turns, untrained=untrained)
        if episode.generation == self._generation:
            return segments
        oldest = np.int32(self._first_version - 1)
        return tuple(
            replace(
                segment,
                versions=np.where(segment.mask, np.minimum(segment.versions, oldest), np.int32(-1)),
            )
            for segment in segments
        )

    async def _request(self, method: str, path: str, body: Any = None) -> bytes:
        if self._http is None:
            timeout = aiohttp.ClientTimeout(total=3 * POLL_S)
            self._http = aiohttp.ClientSession(headers=self._headers, timeout=timeout)
        data = None if body is None else orjson.dumps(body)
        try:
            async with self._http.request(method, self._url + path, data=data) as response:
                content = await response.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise AgentLoopError(f"the swarm server {self._url} is gone: {error!r}") from error
        if response.status >= 400:
            raise AgentLoopError(f"the swarm server refused {path}: {content[:300].decode()}")
        return content


def _truncated(answered: list[Turn]) -> tuple[int, ...]:
    return tuple(turn.index for turn in answered if turn.finish_reason is FinishReason.LENGTH)
