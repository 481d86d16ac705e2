"""Train on what a swarm's clients bring: they run the agents, its server makes the batches."""

from __future__ import annotations

import os

from agent_loop.remote_agent_loop import RemoteAgentLoop
from agent_loop.swarm.producer import SwarmProducer
from agent_loop.swarm.serve import TRAINER_KEY_VARIABLE, URL_VARIABLE
from agent_loop.swarm.wire import TrainerHello
from trainer.errors import ConfigError
from trainer.run.run import Run, open_fit


async def train(run: Run) -> str:
    """Runs to the end; `done` or `stopped`.

    Raises:
        ConfigError: not started by a swarm server.
    """
    url, key = (os.environ.get(name, "") for name in (URL_VARIABLE, TRAINER_KEY_VARIABLE))
    if not url or not key:
        raise ConfigError("swarm: is set, and no swarm server started this; use --swarm-server")

    def producer(loop: RemoteAgentLoop) -> SwarmProducer:
        settings, proxy = loop.settings, loop.proxy
        hello = TrainerHello(
            proxy_url=proxy.base_url,
            proxy_admin_key=proxy.admin_key or "",
            sampling=dict(settings.sampling),
            session_limits=dict(settings.session_limits),
            profile=settings.profile,
            run_dir=str(run.folder.path.absolute()),
        )
        return SwarmProducer(url, key, hello, settings.credit)

    async with open_fit(run, producer) as fit:
        return await fit.run()
