"""`AsyncSwarmClient`: claims episodes, keeps them alive and ends them. One instance per server.

Invariant: a request is repeated only if the repetition has no further effect. The end of an episode
is repeated, because the server gives the same answer to the same end. A claim is not repeated once
it may have arrived; a lost claim is reclaimed when its lease runs out. While an episode is held,
heartbeats extend its lease.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import aiohttp
import orjson
from tenacity import AsyncRetrying, retry_if_exception, stop_after_delay, wait_exponential

from agent_loop.extras.swarm.client_texts import TrainerYaml, config_text, ending
from agent_loop.extras.swarm.errors import SwarmError
from agent_loop.extras.swarm.token import client_token
from agent_loop.extras.swarm.wire import (
    Claim,
    Claimed,
    Decider,
    EngineState,
    EpisodeEnd,
    EpisodeKind,
    EpisodeState,
    EpisodeView,
    Prepare,
    Status,
    TaskCounts,
)
from proxy.machine.direct_hosts import proxy_for

PATIENCE_S = 60.0
REFUSED_S = 1.0
"""Pause after a claim that was refused at once."""


@dataclass(slots=True)
class AsyncSwarmClient:
    """Example:
    async with AsyncSwarmClient("http://trainer:8100", token) as swarm:
        async with swarm.episode(task_id="sum-17") as episode:
            reward = await my_agent(episode.base_url, episode.api_key)
            await swarm.end_episode(episode, reward=reward)
    """

    url: str
    token: str | None = None
    """None: AGENTIC_SWARM_TOKEN, the content of the file that AGENTIC_SWARM_TOKEN_FILE names or,
    for a server on this machine, the token in `runs/swarm`."""
    client_id: str = field(
        default_factory=lambda: f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:6]}"
    )
    patience_s: float = PATIENCE_S
    """Seconds that the server or its proxy may be unreachable before an error is raised."""
    connect_timeout_s: float = 10.0
    """Seconds to connect to the server."""
    request_timeout_s: float = 60.0
    """Seconds that the server may take to answer, in addition to the time that it is asked to
    wait."""
    poll_s: float = 30.0
    """Seconds that one request for an episode or a change waits at the server, at most 60."""
    _http: aiohttp.ClientSession | None = None
    _heartbeats: dict[str, asyncio.Task[None]] = field(default_factory=dict)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        for heartbeats in self._heartbeats.values():
            heartbeats.cancel()
        self._heartbeats.clear()
        if self._http is not None:
            await self._http.close()

    # Episodes.

    async def begin_episode(
        self,
        *,
        task_id: str | None = None,
        kind: EpisodeKind = "train",
        source: str = "default",
        lease_s: float | None = None,
        timeout_s: float | None = None,
    ) -> Claimed:
        """Claims an episode. Waits for it for at most `timeout_s` seconds (None: without limit).

        Raises `throttled` or `state` after `timeout_s`, and `state` at once when the engine is in
        error or offline.
        """
        deadline = None if timeout_s is None else asyncio.get_running_loop().time() + timeout_s
        while True:
            left = self.poll_s if deadline is None else deadline - asyncio.get_running_loop().time()
            claim = Claim(
                client_id=self.client_id,
                kind=kind,
                task_id=task_id,
                source=source,
                lease_s=lease_s,
                wait_s=max(0.0, min(self.poll_s, left)),
            )
            try:
                began = asyncio.get_running_loop().time()
                patience_s = self.patience_s if deadline is None else min(self.patience_s, left)
                body = await self._once("POST", "/v1/episodes", claim.model_dump(), patience_s)
            except SwarmError as error:
                if error.code not in ("throttled", "state") or (
                    deadline is not None and left <= self.poll_s
                ):
                    raise
                if not (await self.status()).state.has_engine:
                    raise
                waited = asyncio.get_running_loop().time() - began
                await asyncio.sleep(max(0.0, min(REFUSED_S, claim.wait_s - waited)))
                continue
            claimed = Claimed.model_validate(body)
            self._heartbeats[claimed.episode_id] = asyncio.create_task(self._beat(claimed))
            return claimed

    async def end_episode(
        self,
        episode: Claimed,
        *,
        reward: float,
        task_id: str | None = None,
        reward_parts: Mapping[str, float] | None = None,
        turn_rewards: Mapping[int, float] | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> EpisodeView:
        """Ends the episode with its reward; both are on disk when this returns.

        `task_id` is needed unless the claim had it. `turn_rewards` adds rewards of single model
        calls, by the calls' numbers from 0.

        Raises `late` when the episode was reclaimed, `conflict` when it already ended differently,
        and `invalid` for the number of a call that was not answered; the episode can then be ended
        again.
        """
        end = ending(
            episode,
            reward=reward,
            task_id=task_id,
            reward_parts=reward_parts,
            turn_rewards=turn_rewards,
            metadata=metadata,
        )
        return await self.commit_episode(episode, end)

    async def prepare_episode(
        self, episode: Claimed, end: EpisodeEnd, decider: Decider | None
    ) -> EpisodeView:
        """Does everything of the end that can fail; the episode counts once it is committed. See
        `agent_loop/extras/swarm/joint.py`."""
        wanted = Prepare(end=end, decider=decider).model_dump(mode="json")
        return EpisodeView.model_validate(await self._of(episode, "prepare", wanted))

    async def commit_episode(self, episode: Claimed, end: EpisodeEnd) -> EpisodeView:
        """Ends the episode. Raises as `end_episode` does."""
        try:
            body = await self._of(episode, "end", end.model_dump(mode="json"))
        except SwarmError as error:
            if error.code != "invalid":  # an invalid end can be corrected
                self.release(episode)
            raise
        self.release(episode)
        return EpisodeView.model_validate(body)

    async def abort_episode(self, episode: Claimed, reason: str = "") -> EpisodeView:
        """Aborts the episode, so that it is never trained. Repeating this is not an error."""
        try:
            said = {"reason": reason.encode(errors="replace").decode()}
            return EpisodeView.model_validate(await self._of(episode, "abort", said))
        finally:
            self.release(episode)

    async def can_continue_episode(self, episode: Claimed) -> bool:
        """False once the episode was reclaimed or aborted: its agent may stop."""
        view = EpisodeView.model_validate(await self._of(episode, "heartbeat", None))
        return view.state is EpisodeState.CLAIMED

    def holds(self, episode: Claimed) -> bool:
        """Whether this client has neither ended nor aborted the episode."""
        return episode.episode_id in self._heartbeats

    @asynccontextmanager
    async def episode(self, **claim: Any) -> AsyncIterator[Claimed]:
        """A claimed episode; it is aborted if the block does not end it."""
        claimed = await self.begin_episode(**claim)
        try:
            yield claimed
        finally:
            if self.holds(claimed):
                await self.abort_episode(claimed, "its block did not end it")

    async def get_episode_buffer(self, limit: int = 1000) -> list[EpisodeView]:
        body = await self._retried("GET", f"/v1/episodes?limit={limit}")
        return [EpisodeView.model_validate(view) for view in body["episodes"]]

    async def task_counts(self, limit: int = 1000) -> list[TaskCounts]:
        """What became of each task's episodes, the task with the newest claim first."""
        body = await self._retried("GET", f"/v1/tasks?limit={limit}")
        return [TaskCounts.model_validate(task) for task in body["tasks"]]

    # The engine.

    async def status(self) -> Status:
        return Status.model_validate(await self._retried("GET", "/v1/status"))

    async def changes(self) -> AsyncIterator[Status]:
        """The status now and after each change, by long-poll."""
        last = -1
        while True:
            status = await self.next_change(last)
            last = status.change
            yield status

    async def next_change(self, after: int) -> Status:
        """The status once its `change` is no longer `after`; -1: the status now."""
        while True:
            path = f"/v1/status?since={after}&wait_s={self.poll_s}"
            status = Status.model_validate(await self._retried("GET", path))
            if status.change != after:
                return status

    async def sync_train_config(self, config: TrainerYaml, *, fresh: bool = False) -> None:
        """Replaces the trainer's YAML. Paths in it are paths on the server's machine.

        If the text differs from the server's, or with `fresh`, the next start begins a new run;
        otherwise it resumes the last checkpoint. Raises `state` while the engine runs.
        """
        path = "/v1/config" + ("?fresh" if fresh else "")
        await self._once("PUT", path, {"config": config_text(config)})

    async def start_engine(self, *, timeout_s: float = 600.0) -> Status:
        """Returns when episodes can be claimed. Raises `state` when the trainer fails, with the
        last line of its log, which names a wrong key of the configuration, for example."""
        await self._once("POST", "/v1/start", None)
        return await self._until_rolling(timeout_s)

    async def stop_engine(self) -> Status:
        return Status.model_validate(await self._once("POST", "/v1/stop", None))

    async def auto_start(
        self, config: TrainerYaml, *, force_restart: bool = False, timeout_s: float = 600.0
    ) -> Status:
        """Starts the engine with `config` if it is not running, and waits until it is up.
        `force_restart` stops it first and begins a new run."""
        state = (await self.status()).state
        if force_restart and state is not EngineState.OFFLINE:
            state = (await self.stop_engine()).state
        if not state.has_engine:
            try:
                await self.sync_train_config(config, fresh=force_restart)
                await self._once("POST", "/v1/start", None)
            except SwarmError as error:
                if error.code != "state":  # `state`: another client has started it
                    raise
        return await self._until_rolling(timeout_s)

    async def agree_sync_weights(self) -> Status:
        """For the stop rules `any_client` and `all_clients`."""
        body = await self._retried("POST", "/v1/agree", {"client_id": self.client_id})
        return Status.model_validate(body)

    async def _until_rolling(self, timeout_s: float) -> Status:
        try:
            async with asyncio.timeout(timeout_s):
                async for status in self.changes():
                    if not status.state.has_engine:
                        raise SwarmError(
                            f"the engine is {status.state.value}: {status.detail}", "state"
                        )
                    if status.state is not EngineState.BOOTING:
                        return status
        except TimeoutError:
            pass
        raise SwarmError(f"the engine is not up after {timeout_s} s", "state")

    async def _beat(self, claimed: Claimed) -> None:
        """Sends three heartbeats per lease until the episode has ended. A heartbeat that fails does
        not stop the next."""
        while True:
            await asyncio.sleep(claimed.lease_s / 3)
            with contextlib.suppress(SwarmError):
                view = EpisodeView.model_validate(
                    await self._call(
                        "POST",
                        f"/v1/episodes/{claimed.episode_id}/heartbeat",
                        None,
                        episode_key=claimed.key,
                        timeout_s=claimed.lease_s / 3,
                    )
                )
                if view.state not in (EpisodeState.CLAIMED, EpisodeState.PREPARED):
                    return

    def release(self, episode: Claimed) -> None:
        """Sends no more heartbeats; this client does not hold the episode any more."""
        if heartbeats := self._heartbeats.pop(episode.episode_id, None):
            heartbeats.cancel()

    async def _of(self, episode: Claimed, what: str, body: Any) -> Any:
        path = f"/v1/episodes/{episode.episode_id}/{what}"
        return await self._retried("POST", path, body, episode_key=episode.key)

    async def _retried(
        self, method: str, path: str, body: Any = None, *, episode_key: str = ""
    ) -> Any:
        async for attempt in AsyncRetrying(
            retry=retry_if_exception(lambda e: isinstance(e, SwarmError) and e.retryable),
            stop=stop_after_delay(self.patience_s),
            wait=wait_exponential(multiplier=0.1, max=3.0),
            reraise=True,
        ):
            with attempt:
                answer = await self._call(method, path, body, episode_key=episode_key)
        return answer

    async def _once(
        self, method: str, path: str, body: Any = None, patience_s: float | None = None
    ) -> Any:
        """A call that is not repeated once it may have arrived: only while nobody listens."""
        unsent = aiohttp.ClientConnectorError
        async for attempt in AsyncRetrying(
            retry=retry_if_exception(lambda error: isinstance(error.__cause__, unsent)),
            stop=stop_after_delay(self.patience_s if patience_s is None else patience_s),
            wait=wait_exponential(multiplier=0.1, max=3.0),
            reraise=True,
        ):
            with attempt:
                answer = await self._call(method, path, body)
        return answer

    async def _call(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        episode_key: str = "",
        timeout_s: float | None = None,
    ) -> Any:
        total_s = self.request_timeout_s + self.poll_s if timeout_s is None else timeout_s
        headers = {"X-Episode-Key": episode_key} if episode_key else {}
        data = None
        if body is not None:
            data, headers["Content-Type"] = _json(body), "application/json"
        try:
            async with self._session().request(
                method,
                self.url.rstrip("/") + path,
                data=data,
                headers=headers,
                timeout=aiohttp.ClientTimeout(total=total_s, sock_connect=self.connect_timeout_s),
            ) as response:
                content = await response.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise SwarmError(
                f"the swarm server {self.url} cannot be reached ({_reason(error)}): check the URL, "
                "or start it with agentic-train --swarm-server HOST:PORT",
                "unreachable",
            ) from error
        try:
            answer = orjson.loads(content) if content else {}
            if response.status >= 400:
                raise SwarmError(answer["error"]["message"], answer["error"]["code"])
        except (orjson.JSONDecodeError, KeyError, TypeError):
            away = response.status in (502, 503, 504)
            raise SwarmError(
                f"{method} {self.url}{path}: HTTP {response.status} is not the answer of a swarm "
                f"server: {content[:200].decode(errors='replace')!r}",
                "unavailable" if away else "protocol",
            ) from None
        return answer

    def _session(self) -> aiohttp.ClientSession:
        if self._http is None:
            token = self.token or client_token(self.url)
            headers = {"Authorization": f"Bearer {token}"} if token else {}
            connector = aiohttp.TCPConnector(limit=0)
            self._http = aiohttp.ClientSession(
                headers=headers, connector=connector, proxy=proxy_for(self.url)
            )
        return self._http


def _reason(error: Exception) -> str:
    if isinstance(error, aiohttp.ClientConnectorError):
        return str(error.os_error)
    return str(error) or type(error).__name__


def _json(body: Any) -> bytes:
    """Raises SwarmError (`invalid`) for what JSON cannot hold."""
    try:
        return orjson.dumps(body)
    except TypeError as error:  # an integer of over 64 bits, half a character
        raise SwarmError(str(error), "invalid") from error
