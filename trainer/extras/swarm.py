"""Trains on the episodes of a swarm: clients run the agents, and the server forms the batches."""

from __future__ import annotations

from pathlib import Path

from agent_loop.extras.swarm.config import SwarmConfig
from agent_loop.extras.swarm.producer import SwarmProducer
from agent_loop.extras.swarm.trainer_process import server_of_trainer
from agent_loop.extras.swarm.wire import TrainerHello
from agent_loop.producers.protocol import RunsTrials
from proxy.client import ProxyClient
from trainer.assembly import SwarmParts
from trainer.config import TrainerConfig
from trainer.errors import ConfigError
from trainer.mains.opening import open_fit
from trainer.run.control import Ended, RunControl
from trainer.run.log import RunLog


async def train(parts: SwarmParts, log: RunLog, control: RunControl) -> Ended:
    """Runs to the end.

    Raises:
        ConfigError: this process was not started by a swarm server.
    """
    server = server_of_trainer()
    if server is None:
        raise ConfigError(
            "swarm: this section is for a trainer that a swarm server starts; use agentic-train "
            "--swarm-server HOST:PORT, or remove the section"
        )
    url, key = server
    config = parts.config

    def producer(_: RunsTrials, proxy: ProxyClient) -> SwarmProducer:
        hello = swarm_hello(config, proxy, log.folder.path)
        return SwarmProducer(url, key, hello, config.remote_agent.credit)

    async with open_fit(parts, log, control, producer) as fit:
        return await fit.run()


def swarm_hello(config: TrainerConfig, proxy: ProxyClient, run_dir: Path) -> TrainerHello:
    """The message that gives the server the sections of the resolved configuration that it uses."""
    return TrainerHello(
        proxy_url=proxy.base_url,
        proxy_admin_key=proxy.admin_key or "",
        swarm=config.swarm if isinstance(config.swarm, SwarmConfig) else SwarmConfig(),
        rollout=config.sampled,
        profile=config.proxy_server.profile,
        policy=config.model.policy,
        run_dir=str(run_dir.absolute()),
    )
