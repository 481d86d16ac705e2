"""`SwarmClient`: `AsyncSwarmClient` for threads. Every call runs on one event loop of its own.

Invariant: nothing is implemented here; what it does is what the asynchronous client does. Any
number of threads may share one instance.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self, TypeVar

from agent_loop.swarm.client import AsyncSwarmClient
from agent_loop.swarm.wire import Claimed, EpisodeView, Status

T = TypeVar("T")


class SwarmClient:
    """Example:
    with SwarmClient("http://trainer:8100", token) as swarm:
        episode = swarm.begin_episode(task_id="sum-17")
        swarm.end_episode(episode, reward=my_agent(episode.base_url, episode.api_key))
    """

    def __init__(self, url: str, token: str | None = None, **settings: Any) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._client = AsyncSwarmClient(url, token, **settings)

    @property
    def client_id(self) -> str:
        return self._client.client_id

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        self._run(self._client.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def begin_episode(self, **claim: Any) -> Claimed:
        return self._run(self._client.begin_episode(**claim))

    def end_episode(
        self,
        episode: Claimed,
        *,
        reward: float,
        task_id: str | None = None,
        reward_parts: Mapping[str, float] | None = None,
        turn_rewards: Mapping[int, float] | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> EpisodeView:
        return self._run(
            self._client.end_episode(
                episode,
                reward=reward,
                task_id=task_id,
                reward_parts=reward_parts,
                turn_rewards=turn_rewards,
                metadata=metadata,
            )
        )

    def abort_episode(self, episode: Claimed, reason: str = "") -> EpisodeView:
        return self._run(self._client.abort_episode(episode, reason))

    def can_continue_episode(self, episode: Claimed) -> bool:
        return self._run(self._client.can_continue_episode(episode))

    @contextmanager
    def episode(self, **claim: Any) -> Iterator[Claimed]:
        """A claimed episode; aborted when the block leaves without having ended it."""
        manager = self._client.episode(**claim)
        claimed = self._run(manager.__aenter__())
        try:
            yield claimed
        finally:
            self._run(manager.__aexit__(None, None, None))

    def get_episode_buffer(self, limit: int = 1000) -> list[EpisodeView]:
        return self._run(self._client.get_episode_buffer(limit))

    def status(self) -> Status:
        return self._run(self._client.status())

    def sync_train_config(self, config: str, *, fresh: bool = False) -> None:
        self._run(self._client.sync_train_config(config, fresh=fresh))

    def start_engine(self, *, timeout_s: float = 600.0) -> Status:
        return self._run(self._client.start_engine(timeout_s=timeout_s))

    def stop_engine(self) -> Status:
        return self._run(self._client.stop_engine())

    def auto_start(
        self, config: str, *, force_restart: bool = False, timeout_s: float = 600.0
    ) -> Status:
        return self._run(
            self._client.auto_start(config, force_restart=force_restart, timeout_s=timeout_s)
        )

    def agree_sync_weights(self) -> Status:
        return self._run(self._client.agree_sync_weights())

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()
