"""Every policy of the producers on real parts: programs as agents, the proxy, and a vLLM whose
weights change while trials are in flight."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from agent_loop.evaluator import EvalConfig, Evaluator
from agent_loop.launchers.command import CommandConfig, CommandLauncher
from agent_loop.producers.asynchronous import AsyncProducer
from agent_loop.producers.buffer import ReplayBuffer
from agent_loop.producers.rollout_config import RolloutConfig
from agent_loop.producers.sync import SyncProducer
from agent_loop.records import Group, Task
from agent_loop.remote_agent_loop import RemoteAgentLoop
from agent_loop.rewards.verifier import Verifier, VerifierConfig
from agent_loop.tasks import Source, TaskStream
from agent_loop.trial.config import SamplingConfig, TrialConfig
from proxy.app import build_app
from proxy.client import ProxyClient
from proxy.config import load_config
from proxy.engines.vllm_server import VllmServer
from proxy.http.server import app_runner
from trainer.optimizer_config import OptimizerConfig
from trainer.policy.model_config import ModelConfig
from trainer.policy.policy import Policy
from trainer.weight_sync.control import EngineControl
from trainer.weight_sync.sync import WeightSync

pytestmark = pytest.mark.engine

ADMIN_KEY = "of-the-test"
AGENT = Path(__file__).parents[1] / "agent_loop" / "small_agent.py"
ANSWER_TOKENS = 60
BATCH = {"groups_per_step": 2, "group_size": 2, "concurrency": 12}
STEPS = 3


@pytest.fixture
def update(vllm: VllmServer, tiny_model: Path) -> Iterator[Any]:
    """Sends the same weights with a new version, while trials in flight continue."""
    policy = Policy(ModelConfig(path=tiny_model), OptimizerConfig())
    sync = WeightSync(EngineControl([vllm.url]))

    async def push(version: int) -> None:
        await asyncio.to_thread(sync.push, policy.named_hf_parameters(), version)

    sync.push(policy.named_hf_parameters(), 0)
    yield push
    sync.push(policy.named_hf_parameters(), 0)
    sync.close()


@asynccontextmanager
async def agent_loop(engine_url: str, model: Path, folder: Path) -> AsyncIterator[RemoteAgentLoop]:
    config = load_config(
        None,
        model=model,
        engines=[{"url": engine_url}],
        store=f"sqlite:///{folder}/proxy.db",
        admin_key=ADMIN_KEY,
    )
    runner = app_runner(build_app(config), handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    async with ProxyClient(url, ADMIN_KEY) as proxy:
        loop = RemoteAgentLoop(
            proxy,
            CommandLauncher(CommandConfig(argv=(sys.executable, "-I", "-S", str(AGENT)))),
            Verifier(VerifierConfig(argv=("true",))),
            folder / "trials",
            trial=TrialConfig(timeout_s=60),
            sampling=SamplingConfig(max_tokens=ANSWER_TOKENS),
        )
        yield loop
        await loop.close()
    await runner.cleanup()


def stream() -> TaskStream:
    data = {"prompt": "Say something.", "turns": 3}
    return TaskStream([Source("a", [Task(f"a{i}", data, "a") for i in range(20)])], seed=0)


def check(groups: list[Group], version: int, max_staleness: int) -> None:
    assert len(groups) == BATCH["groups_per_step"]
    for group in groups:
        assert version - group.oldest_version <= max_staleness
        for rollout in group.rollouts:
            assert rollout.trainable, rollout.error
            assert rollout.num_turns == 3
            assert rollout.forks == {}
            assert rollout.newest_version <= version


async def test_synchronous_batches_come_from_the_current_weights(
    vllm: VllmServer, tiny_model: Path, tmp_path: Path, update: Any
) -> None:
    async with agent_loop(vllm.url, tiny_model, tmp_path) as loop:
        producer = SyncProducer(loop, stream(), RolloutConfig(**BATCH), seed=0)
        for version in range(2):
            check(await producer.next_batch(version), version, 0)
            await update(version + 1)


@pytest.mark.parametrize(
    "policy",
    [
        {"max_staleness": 0, "over_sample": 0.5},
        {"max_staleness": 1},
        {"max_staleness": 1, "stale": "mask", "straggler_factor": 3.0},
        {"max_staleness": 1, "partial_rollout": False, "tail_groups": 2},
    ],
    ids=["over_sample", "partial", "mask", "whole"],
)
async def test_asynchronous_producers_keep_the_staleness_bound_across_updates(
    vllm: VllmServer, tiny_model: Path, tmp_path: Path, update: Any, policy: dict[str, Any]
) -> None:
    settings = RolloutConfig(**BATCH, **policy)
    buffer = ReplayBuffer(tmp_path / "buffer.sqlite")
    async with (
        agent_loop(vllm.url, tiny_model, tmp_path) as loop,
        AsyncProducer(loop, stream(), settings, seed=0, buffer=buffer) as producer,
    ):
        producer.start(0)
        for version in range(STEPS):
            check(await producer.next_batch(version), version, settings.max_staleness)
            await update(version + 1)
            producer.set_version(version + 1)
    buffer.close()


async def test_evaluation_during_production_trains_nothing(
    vllm: VllmServer, tiny_model: Path, tmp_path: Path, update: Any
) -> None:
    buffer = ReplayBuffer(tmp_path / "buffer.sqlite")
    held_out = [Task(f"held-out-{i}", {"prompt": "Say something."}, "b") for i in range(3)]
    async with (
        agent_loop(vllm.url, tiny_model, tmp_path) as loop,
        AsyncProducer(loop, stream(), RolloutConfig(**BATCH), seed=0, buffer=buffer) as producer,
    ):
        producer.start(0)
        report = await Evaluator(loop, held_out, EvalConfig()).evaluate(0)
        groups = await producer.next_batch(0)
    buffer.close()
    assert report.overall.success == 1.0
    assert report.overall.tasks == 3
    assert not any(rollout.trainable for rollout in report.rollouts)
    assert {group.task.source for group in groups} == {"a"}
