"""`SwarmClient` and `JointClient`: the asynchronous clients for threads.

Invariant: nothing is implemented here. Every call runs the asynchronous client on an event loop in
a thread of its own, and any number of threads may share one instance.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator, Mapping
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, contextmanager
from types import TracebackType
from typing import Any, Self, TypeVar

from agent_loop.extras.swarm.client import AsyncSwarmClient
from agent_loop.extras.swarm.client_texts import TrainerYaml
from agent_loop.extras.swarm.joint_client import AsyncJointClient, Episodes
from agent_loop.extras.swarm.wire import Claimed, EpisodeView, Status, TaskCounts

T = TypeVar("T")


class _LoopThread:
    """An event loop in a thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`. Ctrl-C cancels it: a claim that went on would hold its episode for
        nobody. It begins only when this thread can no longer be interrupted without knowing it."""
        known: Future[None] = Future()

        async def begin() -> T:
            try:
                await asyncio.wrap_future(known)
            except asyncio.CancelledError:
                work.close()
                raise
            return await work

        running: Future[T] | None = None
        try:
            running = asyncio.run_coroutine_threadsafe(begin(), self._loop)
            known.set_result(None)
            return running.result()
        except BaseException:
            (known if running is None else running).cancel()
            raise

    @contextmanager
    def within(self, manager: AbstractAsyncContextManager[T]) -> Iterator[T]:
        """Wraps an asynchronous context manager as a synchronous one."""
        entered = self.run(_enter(manager))
        try:
            yield entered
        finally:
            self.run(_leave(manager))

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class SwarmClient:
    """Example:
    with SwarmClient("http://trainer:8100", token) as swarm:
        episode = swarm.begin_episode(task_id="sum-17")
        swarm.end_episode(episode, reward=my_agent(episode.base_url, episode.api_key))
    """

    def __init__(self, url: str, token: str | None = None, **settings: Any) -> None:
        self._client = AsyncSwarmClient(url, token, **settings)
        self._loop = _LoopThread()

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
        self._loop.run(self._client.close())
        self._loop.close()

    def begin_episode(self, **claim: Any) -> Claimed:
        return self._loop.run(self._client.begin_episode(**claim))

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
        return self._loop.run(
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
        return self._loop.run(self._client.abort_episode(episode, reason))

    def can_continue_episode(self, episode: Claimed) -> bool:
        return self._loop.run(self._client.can_continue_episode(episode))

    @contextmanager
    def episode(self, **claim: Any) -> Iterator[Claimed]:
        """A claimed episode; it is aborted if the block does not end it."""
        with self._loop.within(self._client.episode(**claim)) as claimed:
            yield claimed

    def get_episode_buffer(self, limit: int = 1000) -> list[EpisodeView]:
        return self._loop.run(self._client.get_episode_buffer(limit))

    def status(self) -> Status:
        return self._loop.run(self._client.status())

    def changes(self) -> Iterator[Status]:
        """The status now and after each change, without end."""
        last = -1
        while True:
            status = self._loop.run(self._client.next_change(last))
            last = status.change
            yield status

    def task_counts(self, limit: int = 1000) -> list[TaskCounts]:
        return self._loop.run(self._client.task_counts(limit))

    def sync_train_config(self, config: TrainerYaml, *, fresh: bool = False) -> None:
        self._loop.run(self._client.sync_train_config(config, fresh=fresh))

    def start_engine(self, *, timeout_s: float = 600.0) -> Status:
        return self._loop.run(self._client.start_engine(timeout_s=timeout_s))

    def stop_engine(self) -> Status:
        return self._loop.run(self._client.stop_engine())

    def auto_start(
        self, config: TrainerYaml, *, force_restart: bool = False, timeout_s: float = 600.0
    ) -> Status:
        return self._loop.run(
            self._client.auto_start(config, force_restart=force_restart, timeout_s=timeout_s)
        )

    def agree_sync_weights(self) -> Status:
        return self._loop.run(self._client.agree_sync_weights())


class JointClient:
    """`AsyncJointClient` for threads.

    Example: JointClient({"planner": url_1, "coder": url_2}, token)
    """

    def __init__(self, urls: Mapping[str, str], token: str | None = None, **settings: Any) -> None:
        self._joint = AsyncJointClient(
            {name: AsyncSwarmClient(url, token, **settings) for name, url in urls.items()}
        )
        self._loop = _LoopThread()

    def close(self) -> None:
        self._loop.run(self._joint.close())
        self._loop.close()

    def end_episode(
        self, episodes: Episodes, *, rewards: Mapping[str, float], **end: Any
    ) -> Mapping[str, EpisodeView]:
        return self._loop.run(self._joint.end_episode(episodes, rewards=rewards, **end))

    @contextmanager
    def episode(self, **claim: Any) -> Iterator[Episodes]:
        """Claimed episodes; they are aborted if the block does not end them."""
        with self._loop.within(self._joint.episode(**claim)) as episodes:
            yield episodes


async def _enter(manager: AbstractAsyncContextManager[T]) -> T:
    return await manager.__aenter__()


async def _leave(manager: AbstractAsyncContextManager[Any]) -> None:
    await manager.__aexit__(None, None, None)
