"""Engines start while the models are loaded, and all have ended however the start ends."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from proxy.errors import EngineError
from trainer.cluster.cluster import Cluster
from trainer.cluster.starting import StartingEngines
from trainer.engine import EnginesConfig
from trainer.run.control import RunControl, StopRequested


class ScriptedReplica:
    """Answers when `healthy` is set; fails at its start if `fails`."""

    def __init__(self, happened: list[str], *, fails: bool = False) -> None:
        self.url = "http://replica"
        self.healthy = asyncio.Event()
        self._happened = happened
        self._fails = fails

    async def start(self) -> None:
        self._happened.append("starts")
        if self._fails:
            raise EngineError("vLLM did not start")
        try:
            await self.healthy.wait()
        except asyncio.CancelledError:
            self._happened.append("cancelled")
            raise
        self._happened.append("answers")

    async def wait(self) -> str:
        return "code 0"

    async def stop(self) -> None:
        self._happened.append("stopped")


class ScriptedCluster:
    def __init__(self, *, early: bool = True, fails: bool = False) -> None:
        self.happened: list[str] = []
        self.starts_engines_early = early
        self.replicas = [ScriptedReplica(self.happened), ScriptedReplica(self.happened)]
        if fails:
            self.replicas[1] = ScriptedReplica(self.happened, fails=True)

    def replica(self, number: int) -> ScriptedReplica:
        return self.replicas[number]

    def starting(self, control: RunControl, **engine: Any) -> StartingEngines:
        config = EnginesConfig.model_validate({"replicas": 2, **engine})
        return StartingEngines(cast("Cluster", self), config, control)


async def loads(cluster: ScriptedCluster, until: asyncio.Event) -> None:
    await until.wait()
    cluster.happened.append("models")


async def test_engines_start_while_the_models_are_loaded() -> None:
    cluster, control, loaded = ScriptedCluster(), RunControl(), asyncio.Event()
    async with cluster.starting(control) as engines:
        asyncio.get_running_loop().call_later(0, loaded.set)
        await control.wait_for(loads(cluster, loaded))
        assert cluster.happened == ["starts", "starts", "models"]
        for replica in cluster.replicas:
            replica.healthy.set()
        await engines.ready()
        assert cluster.happened[3:] == ["answers", "answers"]
        assert await control.wait_for(asyncio.sleep(0, "the run goes on")) == "the run goes on"
    assert cluster.happened[5:] == ["stopped", "stopped"]


async def test_engines_that_share_a_gpu_with_the_trainer_start_after_it() -> None:
    cluster, control = ScriptedCluster(early=False), RunControl()
    for replica in cluster.replicas:
        replica.healthy.set()
    async with cluster.starting(control) as engines:
        await control.wait_for(loads(cluster, cluster.replicas[0].healthy))
        await engines.ready()
    assert cluster.happened[:2] == ["models", "starts"]


async def test_an_engine_that_cannot_start_ends_the_loading_and_the_other_engine() -> None:
    cluster, control = ScriptedCluster(fails=True), RunControl()
    with pytest.raises(ExceptionGroup) as raised:
        async with cluster.starting(control):
            await control.wait_for(asyncio.Event().wait())
    assert [str(error) for error in raised.value.exceptions] == ["vLLM did not start"]
    assert sorted(cluster.happened[2:]) == ["cancelled", "stopped", "stopped"]


async def test_models_that_cannot_be_loaded_end_the_engines_that_start() -> None:
    cluster, control = ScriptedCluster(), RunControl()

    async def fails() -> None:
        await asyncio.sleep(0)
        raise ValueError("no checkpoint")

    with pytest.raises(ValueError, match="no checkpoint"):
        async with cluster.starting(control):
            await control.wait_for(fails())
    assert cluster.happened == ["starts", "starts", "cancelled", "cancelled", "stopped", "stopped"]


@pytest.mark.parametrize("early", [True, False])
async def test_a_stop_while_engines_start_ends_them(early: bool) -> None:
    cluster, control = ScriptedCluster(early=early), RunControl()

    async def start() -> None:
        async with cluster.starting(control) as engines:
            asyncio.get_running_loop().call_later(0, control.request_stop, 2)
            await engines.ready()

    with pytest.raises(StopRequested):
        await start()
    assert cluster.happened[-4:] == ["cancelled", "cancelled", "stopped", "stopped"]


async def test_engines_that_run_already_are_not_started() -> None:
    cluster, control = ScriptedCluster(), RunControl()
    async with cluster.starting(control, urls=["http://127.0.0.1:9000"]) as engines:
        await engines.ready()
    assert cluster.happened == []
