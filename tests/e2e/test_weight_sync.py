"""New weights in a running vLLM: it serves exactly the trainer's, and a bad update is detected.

Two traps on CPU: vLLM keeps a packed copy of a tied output layer that a reload by name does not
reach, and packs experts only when they are first loaded.
"""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from proxy.engines.address import EngineAddress
from proxy.engines.vllm_server import VllmConfig, VllmServer
from trainer.errors import WeightSyncError
from trainer.optimizer_config import OptimizerConfig
from trainer.policy.model_config import ModelConfig
from trainer.policy.policy import Policy
from trainer.policy.proof_on_copy import randomize
from trainer.policy.shrink import shrunk
from trainer.weight_sync.control import EngineControl
from trainer.weight_sync.probe import probe_batch
from trainer.weight_sync.segment import Written
from trainer.weight_sync.sync import WeightSync
from trainer.weight_sync.transports import SharedMemoryTransport

pytestmark = pytest.mark.engine

TOLERANCE = 1e-3
BFLOAT16_TOLERANCE = 2e-2
IDS = [3, 141, 59, 26, 5, 35, 89, 79, 32, 38, 46, 264, 33, 83, 279, 50, 288, 41, 97, 169]


KILLED = """
import os, signal, sys
from dataclasses import asdict
from pathlib import Path
from tests.e2e.test_weight_sync import disturb, policy_of
from trainer.weight_sync.control import EngineControl
from trainer.weight_sync.segment import SegmentWriter

policy = policy_of(Path(sys.argv[2]))
disturb(policy, 6)
writer, control = SegmentWriter(), EngineControl([sys.argv[1]])
written = asdict(writer.write(policy.named_hf_parameters()))
control.init_weight_transfer_engine(written | {"report": writer.report_path})
os.kill(os.getpid(), signal.SIGKILL)
"""
"""A trainer that is killed when its engines have begun to stage its weights."""


def policy_of(model: Path, dtype: Literal["float32", "bfloat16"] = "float32") -> Policy:
    return Policy(ModelConfig(path=model, compute_dtype=dtype), OptimizerConfig())


def score_ids(policy: Policy, ids: list[int]) -> list[float]:
    """The policy's log-probabilities of `ids[1:]`."""
    return policy.compute_logprobs(probe_batch(ids), temperature=1.0).logprobs.tolist()


def disturb(policy: Policy, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)


def send_wrong_digests(sync: WeightSync, patch: pytest.MonkeyPatch) -> None:
    transport = sync.transport
    assert isinstance(transport, SharedMemoryTransport)
    write = transport.segment.write

    def lies(tensors: Any) -> Written:
        return replace(write(tensors), digest="0" * 64)

    patch.setattr(transport.segment, "write", lies)


def reasons_for_not_staging(sync: WeightSync) -> list[str]:
    assert isinstance(sync.transport, SharedMemoryTransport)
    return sync.transport.unstaged


@pytest.fixture
def sync(vllm: VllmServer, tiny_model: Path) -> Iterator[WeightSync]:
    sync = WeightSync(EngineControl([vllm.url]))
    yield sync
    sync.push(policy_of(tiny_model).named_hf_parameters(), 0)
    sync.close()


def test_engine_serves_exactly_the_pushed_weights(sync: WeightSync, tiny_model: Path) -> None:
    policy = policy_of(tiny_model)
    for version in (1, 2, 3):
        disturb(policy, version)
        with pytest.raises(WeightSyncError, match="does not serve the trainer's weights"):
            sync.verify(IDS, score_ids(policy, IDS), TOLERANCE)
        report = sync.push(policy.named_hf_parameters(), version)
        assert report.version == version
        assert version == 1 or not reasons_for_not_staging(sync)
        assert sync.verify(IDS, score_ids(policy, IDS), TOLERANCE) <= TOLERANCE
        assert sync.control.weight_versions() == [str(version)]


def test_staged_weights_are_not_served_before_they_are_sent(
    sync: WeightSync, tiny_model: Path
) -> None:
    policy = policy_of(tiny_model)
    sync.push(policy.named_hf_parameters(), 5)
    before = score_ids(policy, IDS)
    disturb(policy, 5)
    sync.transport.stage(policy.named_hf_parameters(), None)
    assert not reasons_for_not_staging(sync)
    assert sync.verify(IDS, before, TOLERANCE) <= TOLERANCE
    assert sync.control.weight_versions() == ["5"]
    sync.push(policy.named_hf_parameters(), 6)
    assert sync.verify(IDS, score_ids(policy, IDS), TOLERANCE) <= TOLERANCE


def test_trainer_that_is_killed_while_weights_are_staged_leaves_the_old_ones(
    sync: WeightSync, vllm: VllmServer, tiny_model: Path
) -> None:
    policy = policy_of(tiny_model)
    sync.push(policy.named_hf_parameters(), 7)
    before = score_ids(policy, IDS)
    ended = subprocess.run([sys.executable, "-c", KILLED, vllm.url, tiny_model], check=False)
    assert ended.returncode == -signal.SIGKILL
    assert sync.verify(IDS, before, TOLERANCE) <= TOLERANCE
    disturb(policy, 7)
    sync.push(policy.named_hf_parameters(), 8)
    assert sync.verify(IDS, score_ids(policy, IDS), TOLERANCE) <= TOLERANCE


def test_request_in_flight_continues_and_each_token_carries_its_version(
    sync: WeightSync, vllm: VllmServer, tiny_model: Path
) -> None:
    policy = policy_of(tiny_model)
    sync.push(policy.named_hf_parameters(), 10)
    address = EngineAddress.parse(vllm.url)
    sampled: dict[str, Any] = {}
    started = threading.Event()

    def sample() -> None:
        body = {
            "token_ids": IDS,
            "stream": True,
            "sampling_params": {
                "max_tokens": 1500,
                "ignore_eos": True,
                "temperature": 1.0,
                "logprobs": 0,
            },
        }
        request = urllib.request.Request(
            address.url + "/inference/v1/generate",
            json.dumps(body).encode(),
            {"Content-Type": "application/json", **address.headers},
        )
        ids: list[int] = []
        spans: list[dict[str, Any]] = []
        with urllib.request.urlopen(request, timeout=120) as response:
            for line in response:
                if line.startswith(b"data: {"):
                    started.set()
                    choice = json.loads(line[6:])["choices"][0]
                    ids += choice["token_ids"]
                    spans = choice.get("weight_versions") or spans
        sampled.update(ids=ids, spans=spans)

    thread = threading.Thread(target=sample)
    thread.start()
    assert started.wait(60)
    disturb(policy, 1)
    sync.push(policy.named_hf_parameters(), 11)
    thread.join(120)
    assert len(sampled["ids"]) == 1500
    assert [span["version"] for span in sampled["spans"]] == ["10", "11"]
    edges = [(span["start"], span["end"]) for span in sampled["spans"]]
    assert edges == [(0, edges[0][1]), (edges[0][1], 1500)]


def test_corrupted_bytes_are_refused_and_the_old_weights_are_kept(
    sync: WeightSync, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = policy_of(tiny_model)
    sync.push(policy.named_hf_parameters(), 20)
    before = score_ids(policy, IDS)
    disturb(policy, 1)
    with monkeypatch.context() as patch:
        send_wrong_digests(sync, patch)
        with pytest.raises(WeightSyncError, match="digest"):
            sync.push(policy.named_hf_parameters(), 21)
    sync.control.resume()
    assert sync.verify(IDS, before, TOLERANCE) <= TOLERANCE
    assert sync.control.weight_versions() == ["20"]


def test_missing_weight_is_an_error(sync: WeightSync, tiny_model: Path) -> None:
    policy = policy_of(tiny_model)
    weights = [
        (n, w)
        for n, w in policy.named_hf_parameters()
        if "layers.1.post_attention_layernorm" not in n
    ]
    with pytest.raises(WeightSyncError, match=r"did not contain .*post_attention_layernorm"):
        sync.push(weights, 30)
    sync.control.resume()
    disturb(policy, 2)
    sync.push(policy.named_hf_parameters(), 31)
    assert sync.verify(IDS, score_ids(policy, IDS), TOLERANCE) <= TOLERANCE


@pytest.mark.parametrize("part", ["mlp.up_proj", "self_attn.k_proj"])
def test_missing_part_of_a_fused_weight_is_an_error(
    sync: WeightSync, tiny_model: Path, part: str
) -> None:
    policy = policy_of(tiny_model)
    weights = [(n, w) for n, w in policy.named_hf_parameters() if f"layers.1.{part}" not in n]
    with pytest.raises(WeightSyncError, match=r"only a part of these layers: \['model.layers.1"):
        sync.push(weights, 35)
    sync.control.resume()


def test_exchanged_pair_of_weights_is_detected(sync: WeightSync, tiny_model: Path) -> None:
    policy = policy_of(tiny_model)
    disturb(policy, 3)
    weights = dict(policy.named_hf_parameters())
    first, second = (f"model.layers.{layer}.mlp.down_proj.weight" for layer in (0, 1))
    weights[first], weights[second] = weights[second], weights[first]
    sync.push(weights.items(), 40)
    with pytest.raises(WeightSyncError, match="does not serve"):
        sync.verify(IDS, score_ids(policy, IDS), TOLERANCE)


@contextmanager
def serving(model: Path, dtype: str) -> Iterator[WeightSync]:
    """The weight updates of a vLLM server of its own."""
    args = ("--skip-tokenizer-init",)
    config = VllmConfig(max_context_tokens=256, weight_transfer="shm", args=args)
    with asyncio.Runner() as runner:
        server = VllmServer(config, model, log=model.parent / "vllm.log", dtype=dtype)
        runner.run(server.start())
        try:
            sync = WeightSync(EngineControl([server.url]))
            yield sync
            sync.close()
        finally:
            runner.run(server.stop())


def small_settings(kind: str) -> Any:
    published = CONFIG_MAPPING[kind]()
    if kind == "glm4_moe":
        published.head_dim = 128  # vLLM needs it; only the class in transformers has no default
    settings = shrunk(published)
    settings.max_position_embeddings = 256
    if kind == "qwen3_5":  # vLLM's kernels for a CPU have the published size of heads only
        settings.linear_key_head_dim = settings.linear_value_head_dim = 128
    if hasattr(settings, "moe_intermediate_size"):
        # vLLM's kernel pads other widths than multiples of 32. A reload that packs nothing then
        # fails for its shape; with published widths it succeeds, with wrong weights.
        settings.moe_intermediate_size = 32
    if kind == "gpt_oss":
        settings.intermediate_size = 64  # likewise; vLLM has no kernel for others
    return settings


def small_model(kind: str, folder: Path) -> Path:
    model = AutoModelForCausalLM.from_config(small_settings(kind))
    randomize(model)
    model.save_pretrained(folder)
    return folder


SMALL_IDS = [each % 127 + 1 for each in IDS]


def update_twice(sync: WeightSync, policy: Policy) -> None:
    for version in (1, 2):
        disturb(policy, version)
        with torch.no_grad():
            for name, buffer in policy.model.named_buffers():
                if name.endswith("e_score_correction_bias"):
                    buffer += torch.linspace(-1, 1, len(buffer))
        scores = score_ids(policy, SMALL_IDS)
        with pytest.raises(WeightSyncError, match="does not serve the trainer's weights"):
            sync.verify(SMALL_IDS, scores, TOLERANCE)
        sync.push(policy.named_hf_parameters(), version)
        assert version == 1 or not reasons_for_not_staging(sync)
        assert sync.verify(SMALL_IDS, scores, TOLERANCE) <= TOLERANCE


def test_experts_are_updated_and_kept_when_an_update_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice, because vLLM packs experts for a CPU only when they are first loaded."""
    model = small_model("qwen3_moe", tmp_path / "model")
    with serving(model, "float32") as sync:
        policy = policy_of(model)
        update_twice(sync, policy)
        before = score_ids(policy, SMALL_IDS)
        disturb(policy, 3)
        weights = dict(policy.named_hf_parameters())
        with monkeypatch.context() as patch:
            send_wrong_digests(sync, patch)
            with pytest.raises(WeightSyncError, match="digest"):
                sync.push(weights.items(), 3)
        sync.control.resume()
        assert sync.verify(SMALL_IDS, before, TOLERANCE) <= TOLERANCE
        part = "model.layers.1.mlp.experts.5.up_proj.weight"
        with pytest.raises(
            WeightSyncError, match=r"only a part of these layers: \['model.layers.1"
        ):
            sync.push([(name, w) for name, w in weights.items() if name != part], 4)
        sync.push(weights.items(), 5)
        assert sync.verify(SMALL_IDS, score_ids(policy, SMALL_IDS), TOLERANCE) <= TOLERANCE


@pytest.mark.long
def test_saved_buffers_of_the_router_are_updated(tmp_path: Path) -> None:
    model = small_model("glm4_moe", tmp_path / "model")
    with serving(model, "float32") as sync:
        policy = policy_of(model)
        assert any(
            name.endswith("e_score_correction_bias") for name, _ in policy.named_hf_parameters()
        )
        update_twice(sync, policy)


@pytest.mark.long
@pytest.mark.parametrize("part", ["sinks", "gate_up_proj", "gate_up_proj_bias", "down_proj_bias"])
def test_experts_and_sinks_of_gpt_oss_are_updated(tmp_path: Path, part: str) -> None:
    """Each alone: only the tensors of one kind are other ones."""
    model = small_model("gpt_oss", tmp_path / "model")
    with serving(model, "float32") as sync:
        policy = policy_of(model)
        with torch.no_grad():
            for name, weight in policy.model.named_parameters():
                if name.endswith(part):
                    weight += torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))
        scores = score_ids(policy, SMALL_IDS)
        with pytest.raises(WeightSyncError, match="does not serve the trainer's weights"):
            sync.verify(SMALL_IDS, scores, TOLERANCE)
        sync.push(policy.named_hf_parameters(), 1)
        assert sync.verify(SMALL_IDS, scores, TOLERANCE) <= TOLERANCE


def test_untied_embeddings_in_bfloat16_are_updated(tiny_model: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    model.config.tie_word_embeddings = not model.config.tie_word_embeddings
    other = type(model)(model.config).to(torch.bfloat16)
    other.save_pretrained(tmp_path / "model")
    with serving(tmp_path / "model", "bfloat16") as sync:
        policy = policy_of(tmp_path / "model", "bfloat16")
        sync.push(policy.named_hf_parameters(), 1)
        disturb(policy, 4)
        sync.push(policy.named_hf_parameters(), 2)
        assert not reasons_for_not_staging(sync)
        scores = score_ids(policy, IDS)
        assert sync.verify(IDS, scores, BFLOAT16_TOLERANCE) <= BFLOAT16_TOLERANCE
