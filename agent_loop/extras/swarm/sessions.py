"""The recorded sessions of episodes, at the proxy of the trainer that is up.

Invariant: every session is created by the current trainer's proxy; without a trainer, every request
is refused as `unavailable`.
"""

from __future__ import annotations

import contextlib
from typing import Protocol

from agent_loop.extras.swarm.errors import SwarmError
from agent_loop.extras.swarm.wire import EpisodeEnd, EpisodeView, TrainerHello
from proxy.client import ProxyClientError, SessionHandle
from proxy.records import Session, SessionKind, Turn
from proxy.records.binary import encode_record

SESSION_MARGIN_S = 300.0
"""Seconds that a session lives longer than its episode, for the reward and the collection."""


class Proxy(Protocol):
    """What the swarm uses of `proxy.client.ProxyClient`."""

    async def create_session(
        self,
        trial_id: str | None = None,
        *,
        kind: SessionKind,
        sampling: dict[str, object] | None = None,
        policies: dict[str, str] | None = None,
        profile: str = "default",
        limits: dict[str, object] | None = None,
        metadata: dict[str, object] | None = None,
        ttl_s: float | None = None,
    ) -> SessionHandle: ...

    async def get_turns(self, trial_id: str) -> tuple[Session, list[Turn]]: ...

    async def complete(self, trial_id: str) -> None: ...


class EpisodeSessions:
    """Example: sessions = EpisodeSessions(hello, proxy); await sessions.open(episode.view)"""

    def __init__(self, hello: TrainerHello, proxy: Proxy) -> None:
        self._hello = hello
        self._proxy = proxy

    async def open(self, view: EpisodeView) -> SessionHandle:
        """A session under the episode's id. Raises `unavailable`."""
        hello = self._hello
        train = view.kind == "train"
        try:
            return await self._proxy.create_session(
                view.episode_id,
                kind=SessionKind.TRAIN if train else SessionKind.EVAL,
                sampling=dict(hello.rollout.pinned) if train else {},
                policies={"": hello.policy} if hello.policy else {},
                profile=hello.profile,
                limits=dict(hello.rollout.session_limits),
                metadata={"client_id": view.client_id, "source": view.source},
                ttl_s=hello.swarm.max_life_s + SESSION_MARGIN_S,
            )
        except ProxyClientError as error:
            raise SwarmError(f"the proxy made no session: {error}", "unavailable") from error

    async def finish(self, view: EpisodeView, end: EpisodeEnd) -> bytes:
        """Closes the session and returns its recording.

        Raises `unavailable`, or `invalid` if `end` does not fit the recording.
        """
        try:
            await self._proxy.complete(view.episode_id)
            session, turns = await self._proxy.get_turns(view.episode_id)
        except ProxyClientError as error:
            raise SwarmError(f"the proxy gave no recording: {error}", "unavailable") from error
        answered = [turn.index for turn in turns if turn.sampled]
        if not answered:
            raise SwarmError(
                f"episode {view.episode_id} has no answered model call: abort it", "invalid"
            )
        if unknown := sorted(end.turn_rewards.keys() - set(answered)):
            raise SwarmError(
                f"turn_rewards names the model calls {unknown}, which were not answered; the "
                f"answered calls are {answered}",
                "invalid",
            )
        return encode_record(session, turns)

    async def close(self, episode_id: str) -> None:
        """Closes the session, so that a late agent cannot add to it."""
        with contextlib.suppress(ProxyClientError):  # the session ended with the proxy
            await self._proxy.complete(episode_id)
