"""How the vLLM server of a replica is started: its section, and its GPUs."""

from __future__ import annotations

import os
from functools import partial

from proxy.engines import vllm_platform
from proxy.engines.vllm_server import VllmServer
from trainer.cluster.device_plan import VISIBLE, DevicePlan
from trainer.cluster.local_engine import MakeServer
from trainer.engine import EnginesConfig
from trainer.policy.adapter import adapter_arguments
from trainer.ranks_config import RanksConfig
from trainer.run.folder import RunFolder


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
