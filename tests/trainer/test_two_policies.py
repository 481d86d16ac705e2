"""Two runs train two adapters at the same time on one proxy and one engine, each as if it were
alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from agent_loop.producers.sync import SyncProducer
from agent_loop.records import FinishedTrial, Graded, Task
from agent_loop.remote_agent_loop import RemoteAgentLoop
from agent_loop.tasks import Source, TaskStream
from agent_loop.trial.config import TrialConfig
from proxy.app import build_app
from proxy.client import ProxyClient
from proxy.config import load_config
from tests.agent_loop.asking_agent import AskingAgent
from tests.trainer.adapter_engine import AdapterEngine
from tests.trainer.test_fit import config_of, lines
from trainer.checkpoint import Checkpoints
from trainer.cluster.engines import RunEngines
from trainer.cluster.local import local_trainer
from trainer.config import TrainerConfig
from trainer.fit import Fit
from trainer.run.control import RunControl
from trainer.run.folder import RunFolder
from trainer.run.log import RunLog

KEY = "of-the-test"
POLICIES = ("planner", "coder")
STEPS = 3
GROUP_SIZE = 4


class Parity:
    """The share of sampled ids that are even for the planner, and odd for the coder."""

    def __init__(self, policy: str) -> None:
        self._wanted = POLICIES.index(policy)

    async def grade(self, finished: FinishedTrial) -> Graded:
        (turn,) = finished.turns
        return Graded(float((turn.sampled_ids % 2 == self._wanted).mean()))

    async def close(self) -> None:
        pass


@asynccontextmanager
async def proxy_of(model: Path, engine_url: str, folder: Path) -> AsyncIterator[ProxyClient]:
    config = load_config(
        None,
        model=model,
        engines=[{"url": engine_url}],
        store=f"sqlite:///{folder}/proxy.db",
        admin_key=KEY,
    )
    runner = web.AppRunner(build_app(config), handler_cancellation=True)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        async with ProxyClient(f"http://127.0.0.1:{runner.addresses[0][1]}", KEY) as client:
            yield client
    finally:
        await runner.cleanup()


def run_config(model: Path, policy: str) -> TrainerConfig:
    return config_of(
        model,
        model={"lora": {"rank": 4, "update": "adapter", "policy": policy}},
        optimizer={"lr": 3e-2},
        rollout={"groups_per_step": 1, "group_size": GROUP_SIZE, "seeded": True},
        trainer={"steps": STEPS, "seed": POLICIES.index(policy)},
    )


@asynccontextmanager
async def fit_of(
    config: TrainerConfig, folder: RunFolder, proxy: ProxyClient, engine_url: str
) -> AsyncIterator[Fit]:
    policy, control = config.model.policy, RunControl()
    async with AsyncExitStack() as stack:
        log = stack.enter_context(closing(RunLog(config.logging, folder, steps=STEPS)))
        rank_zero = await stack.enter_async_context(local_trainer(config, folder, control, ()))
        engines = RunEngines(rank_zero, given_urls=[engine_url], adapters=folder.path / "adapters")
        engines.proxy = proxy
        await engines.connect()
        trials = RemoteAgentLoop(
            proxy,
            AskingAgent("policy", max_tokens=6),
            Parity(policy),
            folder.trials,
            trial=TrialConfig(sandbox="off", max_retries=0),
            sampling=config.rollout,
            policy=policy,
        )
        tasks = TaskStream([Source("s", [Task(f"task-{n}", {}) for n in range(3)])], seed=1)
        producer = SyncProducer(trials, tasks, config.rollout, seed=config.trainer.seed)
        checkpoints = Checkpoints(folder.checkpoints, keep_last=1)
        yield Fit(
            config.trainer,
            config.eval,
            rank_zero,
            engines,
            producer,
            None,
            checkpoints,
            log,
            control,
        )


def untimed(line: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in line.items() if not name.startswith("rollout/seconds")}


async def train(model: Path, folder: Path, policies: Sequence[str]) -> dict[str, Any]:
    """Trains the policies at the same time. Returns for each one its metrics and the bytes of its
    adapter, and the policies in the order of the engine's calls."""
    folders = {policy: RunFolder.create(folder / policy) for policy in policies}
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(AdapterEngine(model, len(policies)))
        proxy = await stack.enter_async_context(proxy_of(model, engine.url, folder))
        fits = [
            await stack.enter_async_context(
                fit_of(run_config(model, policy), folders[policy], proxy, engine.url)
            )
            for policy in policies
        ]
        async with asyncio.TaskGroup() as running:
            for fit in fits:
                running.create_task(fit.run())
        sessions = await proxy.list_sessions()
        for session in sessions:
            record, (turn,) = await proxy.get_turns(session["trial_id"])
            assert turn.policy == record.policy_of("")
    results: dict[str, Any] = {"calls": engine.sampled_from, "sessions": len(sessions)}
    for policy, run in folders.items():
        saved = Checkpoints(run.checkpoints, keep_last=1).latest()
        assert saved is not None
        adapter = (saved.path / "adapter" / "adapter_model.safetensors").read_bytes()
        results[policy] = ([untimed(line) for line in lines(run)], adapter)
    return results


@pytest.mark.slow
def test_two_adapters_trained_at_once_equal_each_trained_alone(
    tiny_model: Path, tmp_path: Path
) -> None:
    """Bit for bit: metrics of each step, and the adapters at the end."""
    alone = {
        policy: asyncio.run(train(tiny_model, tmp_path / policy, [policy])) for policy in POLICIES
    }
    both = asyncio.run(train(tiny_model, tmp_path / "both", POLICIES))
    assert both["sessions"] == len(POLICIES) * STEPS * GROUP_SIZE
    assert any(one != other for one, other in pairwise(both["calls"]))
    for policy in POLICIES:
        metrics, adapter = alone[policy][policy]
        assert both[policy] == (metrics, adapter)
        assert [line["step"] for line in metrics] == list(range(1, STEPS + 1))
        assert len({line["reward/mean"] for line in metrics}) > 1
        assert all(line["mismatch/logp_abs_mean"] < 1e-5 for line in metrics)
    assert both["planner"][1] != both["coder"][1]
