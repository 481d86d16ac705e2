"""The trainer's side of a swarm: a producer whose batches come from the swarm's server.

Invariant: a batch is requested once. The request for the next batch reports the last one as
trained, and so does the end of a run whose last checkpoint includes it. Rollouts are built from the
recordings that the server wrote to disk when each episode ended.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import aiohttp
import numpy as np
import orjson

from agent_loop.errors import AgentLoopError, CreditError, RewardError, TrajectoryError
from agent_loop.extras.swarm.wire import (
    BatchView,
    EpisodeView,
    TrainerHello,
    TrainerReady,
    TrainerWelcome,
)
from agent_loop.records import (
    UNSAMPLED,
    AgentEnd,
    AgentResult,
    Graded,
    Group,
    Rollout,
    Segment,
    Task,
)
from agent_loop.trial.credit import CreditConfig
from agent_loop.trial.outcome import Attempt, build_rollout, failed_rollout
from proxy.machine.direct_hosts import proxy_for
from proxy.records import Reward
from proxy.records.binary import decode_record

POLL_S = 30.0


class SwarmProducer:
    """Example: SwarmProducer("http://127.0.0.1:8100", trainer_key, hello)"""

    def __init__(
        self,
        url: str,
        trainer_key: str,
        hello: TrainerHello,
        credit: CreditConfig | None = None,
    ) -> None:
        self._url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {trainer_key}"}
        self._hello = hello
        self._credit = credit or CreditConfig()
        self._generation: int | None = None
        self._first_version = 0
        self._http: aiohttp.ClientSession | None = None
        self._batches = 0
        self._last: int | None = None
        """The server's number of the last batch, until it is reported as trained."""
        self._is_saved = False
        self.counts: Counter[str] = Counter()
        """Number of groups `kept` over the run."""

    def start(self, version: int, state: Mapping[str, Any] | None = None) -> None:
        self._batches = int(state["batches"]) if state else 0

    async def next_batch(self, version: int) -> list[Group]:
        """The groups that met the stop rule, with their tokens.

        Raises:
            AgentLoopError: the swarm server cannot be reached, or refuses.
        """
        if self._generation is None:
            body = await self._request(
                "POST", "/trainer/hello", self._hello.model_dump(mode="json")
            )
            self._generation = TrainerWelcome.model_validate_json(body).generation
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
        """The next request reports it to the server."""

    def state(self) -> dict[str, Any]:
        return {"batches": self._batches}

    def pause(self) -> None:
        """Does nothing: clients run the trials."""

    def resume(self) -> None:
        """Does nothing, as `pause`."""

    def acknowledge(self, state: Mapping[str, Any]) -> None:
        """A checkpoint has been saved. `next_batch` or `close` reports it to the server."""
        self._is_saved = int(state["batches"]) == self._batches

    async def close(self) -> None:
        if self._last is not None and self._is_saved:
            with contextlib.suppress(AgentLoopError):  # a server that ended too keeps the batch
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
        task = Task(str(episode.task_id), episode.metadata, episode.source)
        total_s = (episode.ended_at or 0.0) - episode.claimed_at
        attempt = Attempt(
            episode.episode_id,
            task,
            version=episode.version,
            policies=(session.policy_of(""),),
            started_at=episode.claimed_at,
        )
        agent, times_s = AgentResult(AgentEnd.EXITED, wall_s=total_s), {"total": total_s}
        try:
            rollout = build_rollout(
                attempt,
                agent,
                turns,
                Graded(episode.reward, episode.reward_parts),
                posted=[*session.rewards, *of_turns],
                marks=session.marks,
                credit=self._credit,
                times_s=times_s,
            )
        except (RewardError, CreditError, TrajectoryError) as error:
            # One client's episode must not end the run of all others.
            return failed_rollout(attempt, str(error), agent=agent, turns=turns, times_s=times_s)
        if any(segment.images for segment in rollout.segments):
            lost = "it has images, which a swarm does not hand to the trainer"
            return failed_rollout(attempt, lost, agent=agent, turns=turns, times_s=times_s)
        if episode.generation == self._generation:
            return rollout
        return replace(rollout, segments=tuple(map(self._aged, rollout.segments)))

    def _aged(self, segment: Segment) -> Segment:
        """The segment, with versions of an earlier trainer replaced by one that counts as older.
        They refer to other weights, of which only their greater age is known."""
        oldest = np.int32(self._first_version - 1 if self._first_version else UNSAMPLED - 1)
        versions = np.where(segment.mask, np.minimum(segment.versions, oldest), np.int32(UNSAMPLED))
        return replace(segment, versions=versions)

    async def _request(self, method: str, path: str, body: Any = None) -> bytes:
        if self._http is None:
            timeout = aiohttp.ClientTimeout(total=3 * POLL_S)
            self._http = aiohttp.ClientSession(
                headers=self._headers, timeout=timeout, proxy=proxy_for(self._url)
            )
        data, headers = None, {}
        if body is not None:
            data, headers = orjson.dumps(body), {"Content-Type": "application/json"}
        try:
            async with self._http.request(
                method, self._url + path, data=data, headers=headers
            ) as response:
                content = await response.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise AgentLoopError(
                f"the swarm server {self._url} cannot be reached: {error!r}"
            ) from error
        if response.status >= 400:
            raise AgentLoopError(
                f"the swarm server refused {path}: {content[:300].decode(errors='replace')}"
            )
        return content
