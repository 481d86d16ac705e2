"""Weights in the types in which a real vLLM holds them: its weights are, bit for bit, those that it
has when it receives the trained ones and rounds them itself."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch

from examples.recipes.tiny import tiny_qwen3_5
from proxy.engines.vllm_server import VllmConfig, VllmServer
from tests.e2e.test_weight_sync import (
    BFLOAT16_TOLERANCE,
    IDS,
    disturb,
    policy_of,
    score_ids,
    small_model,
)
from trainer.engine import Backend
from trainer.optimizer_config import OptimizerConfig
from trainer.policy.model_config import LoraSettings, ModelConfig
from trainer.policy.policy import Policy
from trainer.weight_sync.control import EngineControl
from trainer.weight_sync.dtypes import rounded
from trainer.weight_sync.sync import WeightSync
from trainer.weight_sync.transports import SharedMemoryTransport

pytestmark = [pytest.mark.engine, pytest.mark.slow]

PROBE_TOLERANCE = 0.1
"""Of random tokens in bfloat16 (`EnginesConfig.probe_tolerance`)."""
UPDATES = 10
KEPT = {  # of a small model of this architecture, by vLLM in bfloat16
    "qwen3_moe": set[str](),
    "glm4_moe": {"mlp.gate.weight", "mlp.gate.e_score_correction_bias"},
    "qwen3_next": {"linear_attn.A_log"},
    "qwen3_5": {"linear_attn.A_log"},
}
"""Architecture → the ends of the names of weights that the engine holds in float32."""


@contextmanager
def serving(
    model: Path,
    dtypes: Sequence[str],
    backend: Backend = "shm",
    workers: int = 1,
    more: Sequence[str] = (),
) -> Iterator[list[str]]:
    """The URLs of servers on the model, one in each type."""
    extension = ("--worker-extension-cls", "tests.e2e.weight_digest.WeightDigest")
    config = VllmConfig(
        max_context_tokens=256,
        max_sequences=4,
        weight_transfer=backend,
        args=("--skip-tokenizer-init", "--tensor-parallel-size", str(workers), *extension, *more),
        env={"VLLM_CPU_OMP_THREADS_BIND": "nobind"},
    )
    with ExitStack() as stack:
        runner = stack.enter_context(asyncio.Runner())
        servers = [
            VllmServer(config, model, log=model.parent / f"vllm-{dtype}.log", dtype=dtype)
            for dtype in dtypes
        ]
        for server in servers:
            runner.run(server.start())
            stack.callback(lambda stopped: runner.run(stopped.stop()), server)
        yield [server.url for server in servers]


@contextmanager
def updating(*urls: str, backend: Backend = "shm") -> Iterator[WeightSync]:
    sync = WeightSync(EngineControl(urls), backend)
    try:
        yield sync
    finally:
        sync.close()


def digests(sync: WeightSync) -> list[str]:
    """Digests of all weights of each worker."""
    return [digest for (digest,) in sync.control.call_workers("weight_digest")]


def push_both(sync: WeightSync, policy: Policy, version: int) -> tuple[int, int]:
    """Sends the policy in the engine's types, and as it is trained, and compares the engine's
    weights. Returns the sizes of both in bytes."""
    narrow = sync.push(policy.named_hf_parameters(), version, policy.hf_shapes)
    found = digests(sync)
    assert version == 1 or unstaged(sync) == []
    wide = sync.push(policy.named_hf_parameters(), version)
    assert found == digests(sync)
    return narrow.size_bytes, wide.size_bytes


def unstaged(sync: WeightSync) -> list[str]:
    return sync.transport.unstaged if isinstance(sync.transport, SharedMemoryTransport) else []


def test_ten_updates_of_an_engine_in_bfloat16_with_half_the_bytes(tiny_model: Path) -> None:
    with serving(tiny_model, ["bfloat16"]) as urls, updating(*urls) as sync:
        seen = set[str]()
        for version in range(1, 1 + UPDATES):
            policy = policy_of(tiny_model, "bfloat16")
            disturb(policy, version)
            narrow, wide = push_both(sync, policy, version)
            assert 2 * narrow == wide
            sync.push(policy.named_hf_parameters(), version, policy.hf_shapes)
            assert sync.verify(IDS, score_ids(policy, IDS), BFLOAT16_TOLERANCE) > 0
            seen.update(digests(sync))
        assert len(seen) == UPDATES


@pytest.mark.long
@pytest.mark.parametrize("kind", KEPT)
def test_weights_that_an_engine_in_bfloat16_keeps_in_float32_are_sent_in_float32(
    kind: str, tmp_path: Path
) -> None:
    model = small_model(kind, tmp_path / "model")
    policy = policy_of(model, "bfloat16")
    with serving(model, ["bfloat16"]) as urls, updating(*urls) as sync:
        kept = {
            name: each.nbytes
            for name, each in policy.hf_shapes()
            if name.endswith(tuple(KEPT[kind]))
        }
        assert bool(kept) == bool(KEPT[kind])
        for version in (1, 2, 3):
            disturb(policy, version)
            narrow, wide = push_both(sync, policy, version)
            assert 2 * narrow == wide + sum(kept.values())
        if kept:  # the digest would find that one of them was rounded
            right = digests(sync)
            everything = dict.fromkeys(dict(policy.hf_shapes()), torch.bfloat16)
            sync.push(rounded(policy.named_hf_parameters(), everything), 4)
            assert digests(sync) != right


@pytest.mark.long
def test_text_model_is_updated_that_is_tied_and_beside_a_vision_tower(tmp_path: Path) -> None:
    """As Qwen3.5-4B: its weights have other names in vLLM than in its checkpoint."""
    model = tmp_path / "model"
    tiny_qwen3_5(model)
    policy = policy_of(model, "bfloat16")
    with (
        serving(model, ["bfloat16"], more=["--language-model-only"]) as urls,
        updating(*urls) as sync,
    ):
        for version in (1, 2):
            disturb(policy, version)
            push_both(sync, policy, version)
            sync.push(policy.named_hf_parameters(), version, policy.hf_shapes)
            assert sync.verify(IDS, score_ids(policy, IDS), PROBE_TOLERANCE) > 0


@pytest.mark.long
@pytest.mark.parametrize("kind", KEPT)
def test_engine_in_float32_receives_float32(kind: str, tmp_path: Path) -> None:
    model = small_model(kind, tmp_path / "model")
    policy = policy_of(model)
    with serving(model, ["float32"]) as urls, updating(*urls) as sync:
        for version in (1, 2):
            disturb(policy, version)
            narrow, wide = push_both(sync, policy, version)
            assert narrow == wide


@pytest.mark.long
def test_engines_of_different_types_are_served_by_one_update_over_gloo(tmp_path: Path) -> None:
    """Two of two workers each: the one in bfloat16 rounds by itself, until it is alone."""
    model = small_model("qwen3_moe", tmp_path / "model")
    policy = policy_of(model, "bfloat16")
    with serving(model, ["bfloat16", "float32"], "gloo", workers=2) as urls:
        with updating(*urls, backend="gloo") as both:
            disturb(policy, 1)
            narrow, wide = push_both(both, policy, 1)
            assert narrow == wide
            assert len(digests(both)) == 4
        with updating(urls[0], backend="gloo") as alone:
            narrow, wide = push_both(alone, policy, 2)
            assert 2 * narrow == wide


def test_adapters_are_merged_before_they_are_rounded(tiny_model: Path) -> None:
    lora = LoraSettings(rank=4)
    policy = Policy(
        ModelConfig(path=tiny_model, compute_dtype="bfloat16", lora=lora), OptimizerConfig()
    )
    with serving(tiny_model, ["bfloat16"]) as urls, updating(*urls) as sync:
        for version in (1, 2):
            disturb(policy, version)
            narrow, wide = push_both(sync, policy, version)
            assert 2 * narrow == wide
