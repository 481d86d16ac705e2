"""Top-k and top-p of a real vLLM, and the trainer's probabilities over what they left."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from agent_loop.records import Group, Rollout, RolloutStatus, Task
from agent_loop.trajectory import build_segments
from proxy.engines.vllm_server import VllmConfig, VllmServer
from tests.e2e.running_proxy import running_proxy
from trainer.batch import build_batch
from trainer.optimizer_config import OptimizerConfig
from trainer.policy.model_config import ModelConfig
from trainer.policy.policy import Policy

SESSIONS = 4
NOISE_NATS = 1e-5


async def test_log_probabilities_are_those_over_the_tokens_that_were_left(
    tiny_model: Path, tmp_path: Path
) -> None:
    config = VllmConfig(max_sequences=SESSIONS)
    server = VllmServer(config, tiny_model, log=tmp_path / "vllm.log", dtype="float32")
    policy = Policy(ModelConfig(path=tiny_model), OptimizerConfig())
    async with server, running_proxy(tiny_model, server.url, tmp_path) as running:
        for top_k, top_p in ((20, 1.0), (10, 0.5), (3, 1.0), (1, 1.0)):
            pinned = {"top_k": top_k, "top_p": top_p, "alternatives": 20, "temperature": 0.7}
            talks = (running.talk(pinned, turns=3) for _ in range(SESSIONS))
            rollouts = [
                Rollout(f"t-{n}", Task("a", {}), RolloutStatus.DONE, 1.0, build_segments(turns))
                for n, turns in enumerate(await asyncio.gather(*talks))
            ]
            batch = build_batch([Group("g", rollouts[0].task, rollouts)])
            assert batch.kept is not None
            left = torch.tensor([len(row.unique()) for row in batch.kept])
            assert left.max() <= top_k
            assert (batch.kept == batch.ids[:, None]).any(1).all()
            scores = policy.compute_logprobs(batch, temperature=0.7)
            assert scores.logprobs.tolist() == pytest.approx(
                batch.logprobs.tolist(), abs=NOISE_NATS
            )
            assert (scores.entropy <= left.log() + NOISE_NATS).all()
            if top_k > 1:
                assert left.max() > 1
                batch.kept = None
                whole = policy.compute_logprobs(batch, temperature=0.7).logprobs
                assert float((whole - batch.logprobs).abs().mean()) > 0.1
            else:
                assert float(batch.logprobs.abs().max()) == 0
