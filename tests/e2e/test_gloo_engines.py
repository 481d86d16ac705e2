"""Weights over gloo to a real vLLM server, which serves exactly what was sent, or what it had."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from proxy.engines.vllm_server import VllmConfig, VllmServer
from tests.e2e.test_weight_sync import IDS, TOLERANCE, disturb, policy_of, score_ids
from trainer.errors import WeightSyncError
from trainer.policy.policy import Policy
from trainer.weight_sync.control import EngineControl
from trainer.weight_sync.segment import Named
from trainer.weight_sync.sync import WeightSync, verify_engines

START_TIMEOUT_S = 1800.0
"""A machine that runs other work needs more than the default."""


def interrupted(policy: Policy) -> Iterator[Named]:
    """All weights but the last."""
    *sent, _ = policy.named_hf_parameters()
    yield from sent
    raise KeyboardInterrupt


@pytest.mark.slow
def test_engine_serves_exactly_the_weights_that_gloo_brought(
    tiny_model: Path, tmp_path: Path
) -> None:
    config = VllmConfig(
        max_context_tokens=256,
        max_sequences=4,
        weight_transfer="gloo",
        start_timeout_s=START_TIMEOUT_S,
    )
    policy = policy_of(tiny_model)
    with asyncio.Runner() as runner:
        server = VllmServer(config, tiny_model, log=tmp_path / "vllm.log", dtype="float32")
        runner.run(server.start())
        try:
            sync = WeightSync(EngineControl([server.url]), "gloo")
            for version in (1, 2):
                disturb(policy, version)
                sync.push(policy.named_hf_parameters(), version, policy.hf_shapes)
                assert sync.verify(IDS, score_ids(policy, IDS), TOLERANCE) <= TOLERANCE
            with pytest.raises(WeightSyncError, match="did not contain these weights"):
                sync.push(list(policy.named_hf_parameters())[1:], 3)
            before = score_ids(policy, IDS)
            disturb(policy, 3)
            with pytest.raises(KeyboardInterrupt):
                sync.push(interrupted(policy), 3, policy.hf_shapes)
            sync.close()  # as the kernel does for a killed trainer
            control = EngineControl([server.url])
            control.resume()
            assert verify_engines(control, IDS, before, TOLERANCE) <= TOLERANCE
            control.close()
            again = WeightSync(EngineControl([server.url]), "gloo")
            again.push(policy.named_hf_parameters(), 4, policy.hf_shapes)
            assert again.verify(IDS, score_ids(policy, IDS), TOLERANCE) <= TOLERANCE
            again.close()
        finally:
            runner.run(server.stop())
