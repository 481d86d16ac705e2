"""A vLLM server of the run on this machine, which can be started again after it has ended."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from functools import partial
from http import HTTPStatus

import aiohttp

from proxy.engines import vllm_platform
from proxy.engines.address import EngineAddress
from proxy.engines.vllm_server import VllmServer
from trainer.cluster.device_plan import VISIBLE, DevicePlan
from trainer.engine import EnginesConfig
from trainer.errors import TrainerError
from trainer.policy.adapter import adapter_arguments
from trainer.ranks_config import RanksConfig
from trainer.run.folder import RunFolder

HEALTH_INTERVAL_S = 1.0
"""Seconds between two health checks; a check takes the server less than a millisecond."""
HEALTH_TIMEOUT_S = 10.0

MakeServer = Callable[..., VllmServer]
"""A new server for each start; takes the keyword arguments of `VllmServer`."""


def replica_server(
    config: RanksConfig,
    folder: RunFolder,
    number: int,
    server: type[VllmServer] = VllmServer,
    plan: DevicePlan | None = None,
    node: int = 0,
) -> MakeServer:
    """Makes the server of replica `number`, on the GPUs of the plan if there is one; each replica
    has its own seed. `node`: which of the nodes of an engine that has several; each has a log."""
    engine, model = replica_engine(config), config.model
    if plan is not None:
        engine = plan.engine_config(engine, number, os.environ.get(VISIBLE, ""))
    name = f"engine-{number}" + (f"-node-{node}" if node else "")
    return partial(
        server,
        engine,
        model.path,
        log=folder.logs / f"{name}.log",
        dtype=engine.served_dtype(model),
        seed=config.trainer.seed + number,
    )


def replica_engine(config: RanksConfig) -> EnginesConfig:
    """The section `engine` with what the run needs: adapters, the router's choices, sums in one
    order."""
    engine, model = config.engine, config.model
    if config.trainer.deterministic:
        variables = {**vllm_platform.installed().repeatable, **engine.env}
        engine = engine.model_copy(update={"env": variables})
    if model.router_replay == "replay":
        engine = engine.model_copy(update={"routed_experts": True})
    if model.lora is not None and model.policy:
        rank, slots = config.engine_adapters
        given = {
            "lora_rank": rank,
            "lora_slots": slots,
            "args": (*adapter_arguments(model.path), *engine.args),
        }
        engine = engine.model_copy(update=given)
    return engine


async def until_engine_is_dead(url: str) -> str:
    """Returns how it is known, when a server that has answered reports that its engine process is
    dead (503 at `/health`), or does not listen any more: vLLM then still waits for requests that
    its dead engine never answers. A server that listens and does not answer may be busy; if its
    process ends, this is noticed in another way."""
    address = EngineAddress.parse(url)
    timeout = aiohttp.ClientTimeout(total=HEALTH_TIMEOUT_S)
    async with aiohttp.ClientSession(timeout=timeout, headers=address.headers) as session:
        while True:
            await asyncio.sleep(HEALTH_INTERVAL_S)
            try:
                async with session.get(f"{address.url}/health") as answer:
                    if answer.status == HTTPStatus.SERVICE_UNAVAILABLE:
                        return "its engine process died, "
            except aiohttp.ClientConnectorError as error:
                if isinstance(error.os_error, ConnectionRefusedError):
                    return "it closed its port, "
            except (aiohttp.ClientError, TimeoutError):
                pass


async def _never() -> str:
    await asyncio.Event().wait()
    return ""


class LocalReplica:
    """Example: replica = LocalReplica(replica_server(config, folder, 0))"""

    def __init__(self, make_server: MakeServer) -> None:
        self._make_server = make_server
        self._server: VllmServer | None = None
        self.url = ""

    async def start(self) -> None:
        self._server = self._make_server()
        await self._server.start()
        self.url = self._server.url

    async def wait(self) -> str:
        if self._server is None:
            raise TrainerError("the engine was not started")
        ended = asyncio.create_task(self._server.wait())
        answers = self._server.answers
        dead = asyncio.create_task(until_engine_is_dead(self.url) if answers else _never())
        try:
            await asyncio.wait({ended, dead}, return_when=asyncio.FIRST_COMPLETED)
            if not ended.done():  # vLLM would wait for calls that its dead engine never answers
                await self._server.stop()
            how = dead.result() if dead.done() else ""
            code, words = await ended, self._server.last_words()
            return f"{how}exit code {code}: {words} (log: {self._server.log})"
        finally:
            for task in (ended, dead):
                task.cancel()

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop()
