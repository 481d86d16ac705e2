"""New weights in a running vLLM: it serves exactly the trainer's, and a bad update is detected.

Tied embeddings are the trap: on CPU vLLM keeps a packed copy of the output layer that a reload by
name does not reach.
"""

from __future__ import annotations

import asyncio
import json
import threading
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from proxy.engines.address import EngineAddress
from proxy.engines.vllm_server import VllmConfig, VllmServer
from trainer.errors import WeightSyncError
from trainer.optimizer import OptimizerConfig
from trainer.policy.model import ModelConfig
from trainer.policy.policy import Policy
from trainer.weight_sync.control import EngineControl
from trainer.weight_sync.probe import probe_batch
from trainer.weight_sync.segment import Written
from trainer.weight_sync.sync import WeightSync
from trainer.weight_sync.transports import SharedMemoryTransport

pytestmark = pytest.mark.engine

TOLERANCE = 1e-3
IDS = [3, 141, 59, 26, 5, 35, 89, 79, 32, 38, 46, 264, 33, 83, 279, 50, 288, 41, 97, 169]


def policy_of(model: Path) -> Policy:
    return Policy(ModelConfig(path=model), OptimizerConfig())


def score_ids(policy: Policy, ids: list[int]) -> list[float]:
    """The policy's log-probabilities of `ids[1:]`."""
    return policy.compute_logprobs(probe_batch(ids), temperature=1.0).logprobs.tolist()


def disturb(policy: Policy, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)


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
        assert sync.verify(IDS, score_ids(policy, IDS), TOLERANCE) <= TOLERANCE
        assert sync.control.weight_versions() == [str(version)]


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
        ids, spans = [], []
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
    transport = sync.transport
    assert isinstance(transport, SharedMemoryTransport)
    write = transport.segment.write

    def lies(tensors: Any) -> Written:
        return replace(write(tensors), digest="0" * 64)

    with monkeypatch.context() as patch:
        patch.setattr(transport.segment, "write", lies)
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


def test_untied_embeddings_in_bfloat16_are_updated(tiny_model: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    model.config.tie_word_embeddings = not model.config.tie_word_embeddings
    other = type(model)(model.config).to(torch.bfloat16)
    other.save_pretrained(tmp_path / "model")
    config = VllmConfig(
        max_context_tokens=256, weight_transfer="shm", args=("--skip-tokenizer-init",)
    )
    with asyncio.Runner() as runner:
        server = VllmServer(config, tmp_path / "model", log=tmp_path / "vllm.log", dtype="bfloat16")
        runner.run(server.start())
        try:
            sync = WeightSync(EngineControl([server.url]))
            policy = Policy(
                ModelConfig(path=tmp_path / "model", compute_dtype="bfloat16"), OptimizerConfig()
            )
            disturb(policy, 4)
            sync.push(policy.named_hf_parameters(), 1)
            assert sync.verify(IDS, score_ids(policy, IDS), 2e-2) <= 2e-2
            sync.close()
        finally:
            runner.run(server.stop())
