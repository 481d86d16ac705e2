"""Top-k and top-p of a real vLLM, and the trainer's probabilities over what they left."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from agent_loop.records import Group, Rollout, RolloutStatus, Task
from agent_loop.trajectory import build_segments
from proxy.engines.vllm_server import VllmConfig, VllmServer
from tests.e2e.running_proxy import Running, running_proxy
from trainer.batch import Batch, build_batch
from trainer.optimizer_config import OptimizerConfig
from trainer.policy.model_config import ModelConfig
from trainer.policy.policy import Policy

SESSIONS = 4
NOISE_NATS = 1e-5
MEAN_NATS = 1e-6
FIRST_SEED = 10
"""Of draws without a seed, one in three has a token that is up to 2.2e-5 from the engine's."""


MODEL = Path("examples/quickstart/model")
SCHEMA = {
    "type": "object",
    "properties": {"item": {"enum": ["apples", "jars"]}, "total": {"type": "integer"}},
    "required": ["item", "total"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "order", "schema": SCHEMA}}


async def sampled(running: Running, pinned: dict[str, float], **more: Any) -> Batch:
    seeds = range(FIRST_SEED, FIRST_SEED + SESSIONS)
    talks = (running.talk({**pinned, "seed": seed}, turns=3, **more) for seed in seeds)
    rollouts = [
        Rollout(f"t-{n}", Task("a", {}), RolloutStatus.DONE, 1.0, build_segments(turns))
        for n, turns in enumerate(await asyncio.gather(*talks))
    ]
    return build_batch([Group("g", rollouts[0].task, rollouts)])


def check(batch: Batch, temperature: float) -> float:
    """The trainer's log-probabilities are the engine's; the mean |Δ| if it computes them over the
    whole vocabulary."""
    assert batch.kept is not None
    assert (batch.kept == batch.ids[:, None]).any(1).all()
    policy = Policy(ModelConfig(path=MODEL), OptimizerConfig())
    scores = policy.compute_logprobs(batch, temperature=temperature)
    assert scores.logprobs.tolist() == pytest.approx(batch.logprobs.tolist(), abs=NOISE_NATS)
    assert (scores.logprobs - batch.logprobs).abs().mean() < MEAN_NATS
    left = torch.tensor([len(row.unique()) for row in batch.kept])
    assert (scores.entropy <= left.log() + NOISE_NATS).all()
    batch.kept = None
    whole = policy.compute_logprobs(batch, temperature=temperature).logprobs
    return float((whole - batch.logprobs).abs().mean())


async def test_log_probabilities_are_those_over_what_top_k_top_p_and_a_grammar_left(
    tmp_path: Path,
) -> None:
    config = VllmConfig(max_sequences=SESSIONS)
    server = VllmServer(config, MODEL, log=tmp_path / "vllm.log", dtype="float32")
    async with server, running_proxy(MODEL, server.url, tmp_path) as running:
        for top_k, top_p in ((20, 1.0), (10, 0.5), (3, 1.0), (1, 1.0)):
            pinned = {"top_k": top_k, "top_p": top_p, "alternatives": 20, "temperature": 2.0}
            batch = await sampled(running, pinned)
            assert batch.kept is not None
            most = max(len(row.unique()) for row in batch.kept)
            assert 1 <= most < top_k if top_p < 1 else most == top_k
            assert check(batch, 2.0) > 0.01
        # Also where the session pins the whole vocabulary, as trainers do.
        whole = {"temperature": 1.0, "top_p": 1.0, "top_k": -1}
        batch = await sampled(running, whole, response_format=FORMAT)
        assert batch.num_tokens > 50
        assert check(batch, 1.0) > 1
        assert (await sampled(running, whole)).kept is None
