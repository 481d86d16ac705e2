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
from trainer.weight_sync.transports import VllmTransport

START_TIMEOUT_S = 1800.0
"""A machine that runs other work needs more than the default."""


def while_it_serves(policy: Policy, url: str, before: list[float]) -> Iterator[Named]:
    """The policy's weights; before each part of them is sent, the engine still samples with the
    ones before."""
    control = EngineControl([url], timeout_s=60.0)  # a paused engine does not answer
    for number, each in enumerate(policy.named_hf_parameters()):
        if number % 5 == 0:
            assert verify_engines(control, IDS, before, TOLERANCE) <= TOLERANCE
        yield each
    control.close()


def reasons_for_not_staging(sync: WeightSync) -> tuple[str, ...]:
    assert isinstance(sync.transport, VllmTransport)
    unstaged: tuple[str, ...] = sync.transport.engine.unstaged
    return unstaged


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
            for version in (1, 2, 3):
                before = score_ids(policy, IDS)
                disturb(policy, version)
                weights = while_it_serves(policy, server.url, before)
                sync.push(weights, version, policy.hf_shapes)
                learning = "it learns how from its first update"
                assert reasons_for_not_staging(sync) == (() if version > 1 else (learning,))
                assert sync.verify(IDS, score_ids(policy, IDS), TOLERANCE) <= TOLERANCE
            with pytest.raises(WeightSyncError, match="did not contain these weights"):
                sync.push(list(policy.named_hf_parameters())[1:], 4)
            sync.push(policy.named_hf_parameters(), 4, policy.hf_shapes)
            before = score_ids(policy, IDS)
            disturb(policy, 4)
            with pytest.raises(KeyboardInterrupt):
                sync.push(interrupted(policy), 5, policy.hf_shapes)
            sync.close()
            control = EngineControl([server.url], timeout_s=60.0)
            assert verify_engines(control, IDS, before, TOLERANCE) <= TOLERANCE
            assert control.weight_versions() == ["4"]
            control.close()
            again = WeightSync(EngineControl([server.url]), "gloo")
            again.push(policy.named_hf_parameters(), 6, policy.hf_shapes)
            assert reasons_for_not_staging(again) == ()
            assert again.verify(IDS, score_ids(policy, IDS), TOLERANCE) <= TOLERANCE
            again.close()
        finally:
            runner.run(server.stop())
