"""The models that a judge can be: an endpoint, a checkpoint that the run serves, or the policy.

Invariant: what the policy answers as a judge is recorded in a session of kind `eval`, so that it is
never trained.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from agent_loop.errors import RewardError
from agent_loop.model_api import json_headers
from agent_loop.records import FinishedTrial
from proxy.client import ProxyClientError
from proxy.engines.address import EngineAddress
from proxy.engines.vllm_server import VllmConfig, VllmServer
from proxy.errors import ConfigurationError, EngineError
from proxy.records import SessionKind

JSON = {"Content-Type": "application/json"}
SERVED_NAME = "judge"
"""The name under which the run serves a judge's checkpoint."""


@dataclass(frozen=True, slots=True)
class JudgeAccess:
    """Where a judge's model answers.

    Example: JudgeAccess("https://…/v1", "gpt-5", {"Authorization": "Bearer sk-…"})
    """

    base_url: str
    """URL of an OpenAI-compatible endpoint, with `/v1`."""
    model: str
    headers: Mapping[str, str] = field(repr=False)
    """Headers of each request, which authorise it."""


class JudgeModel(Protocol):
    """Implementations: `EndpointJudge`, `ServedJudge`, `PolicyJudge`."""

    def access(self, finished: FinishedTrial) -> AbstractAsyncContextManager[JudgeAccess]:
        """A context in which the model answers about this trial.

        Raises:
            RewardError: the model cannot be asked.
        """
        ...

    async def close(self) -> None:
        """Ends what was started for the model."""
        ...


class EndpointJudge:
    """A model behind a URL."""

    def __init__(self, base_url: str, model: str, api_key_env: str | None) -> None:
        """Raises ConfigurationError: the key's variable is not set."""
        headers = json_headers("judge.api_key_env", api_key_env, "the judge's API key")
        self._access = JudgeAccess(base_url.rstrip("/"), model, headers)

    @asynccontextmanager
    async def access(self, _: FinishedTrial) -> AsyncIterator[JudgeAccess]:
        yield self._access

    async def close(self) -> None:
        pass


class ServedJudge:
    """A checkpoint, which a vLLM server of the run's own serves from the first trial on."""

    def __init__(
        self, checkpoint: Path, engine: VllmConfig, server: type[VllmServer] = VllmServer
    ) -> None:
        """Raises ConfigurationError: the folder is not a checkpoint."""
        if not (checkpoint / "config.json").is_file():
            raise ConfigurationError(
                f"judge.model: {checkpoint} has no config.json; give the folder of a checkpoint, "
                "`policy`, or the name of a model at base_url"
            )
        self._checkpoint = checkpoint
        self._engine = engine
        self._make = server
        self._starting: asyncio.Task[VllmServer] | None = None

    @asynccontextmanager
    async def access(self, finished: FinishedTrial) -> AsyncIterator[JudgeAccess]:
        if self._starting is None:
            log = finished.trial.directory.parent.parent / "logs" / "judge.log"
            self._starting = asyncio.create_task(self._start(log.absolute()))
        try:
            server = await asyncio.shield(self._starting)
        except (EngineError, ConfigurationError) as error:
            raise RewardError(f"judge: {self._checkpoint} is not served: {error}") from error
        if not server.running:
            raise RewardError(f"judge: its server ended: {server.last_words()} (log: {server.log})")
        address = EngineAddress.parse(server.url)
        yield JudgeAccess(f"{address.url}/v1", SERVED_NAME, JSON | address.headers)

    async def close(self) -> None:
        if self._starting is None:
            return
        self._starting.cancel()
        (started,) = await asyncio.gather(self._starting, return_exceptions=True)
        self._starting = None
        if isinstance(started, VllmServer):
            await started.stop()

    async def _start(self, log: Path) -> VllmServer:
        server = self._make(self._engine, self._checkpoint, log=log, served_model_name=SERVED_NAME)
        await server.start()
        return server


class PolicyJudge:
    """The policy that is trained, with its weights at that time."""

    def __init__(self, ttl_s: float) -> None:
        """`ttl_s`: seconds after which a session of the judge expires if it was not completed."""
        self._ttl_s = ttl_s

    @asynccontextmanager
    async def access(self, finished: FinishedTrial) -> AsyncIterator[JudgeAccess]:
        proxy = finished.proxy
        if proxy is None:
            raise RewardError(
                "judge.model=policy: this trial was not recorded by a proxy of the policy"
            )
        try:
            session = await proxy.create_session(
                kind=SessionKind.EVAL,
                policies=finished.session.sampling.get("policies"),
                metadata={"judges": finished.trial.trial_id},
                ttl_s=self._ttl_s,
            )
            try:
                headers = JSON | {"Authorization": f"Bearer {session.api_key}"}
                yield JudgeAccess(session.base_url, finished.trial.model, headers)
            finally:
                with suppress(ProxyClientError):  # the judge has answered; the session expires
                    await proxy.complete(session.trial_id)
        except ProxyClientError as error:
            raise RewardError(f"judge: the policy's proxy: {error}") from error

    async def close(self) -> None:
        pass
