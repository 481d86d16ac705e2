"""New versions of LoRA adapters in a running vLLM: exactly the trainer's, and never another's."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import Iterator
from contextlib import aclosing, contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from proxy.engines.protocol import Sampling
from proxy.engines.vllm import VllmEngine
from proxy.engines.vllm_server import VllmConfig, VllmServer
from proxy.records import ServedPolicy, VersionSpan
from proxy.routing.generation import Cause, Generation, Seam
from proxy.routing.router import Router
from tests.proxy.pushed import chunks_of, pieces_of
from trainer.errors import WeightSyncError
from trainer.optimizer_config import OptimizerConfig
from trainer.policy.adapter import adapter_arguments, adapter_config
from trainer.policy.model_config import LoraSettings, ModelConfig
from trainer.policy.policy import Policy
from trainer.policy.proof_on_copy import randomize
from trainer.policy.shrink import shrunk
from trainer.weight_sync.adapters import AdapterSync
from trainer.weight_sync.control import EngineControl
from trainer.weight_sync.probe import probe_batch

pytestmark = [pytest.mark.engine, pytest.mark.long]

TOLERANCE = 1e-3
ANSWER_TOKENS = 1000
IDS = [each % 127 + 1 for each in range(3, 420, 6)]  # more than one block of vLLM's prefix cache


def save_small(kind: str, folder: Path) -> Path:
    settings = shrunk(CONFIG_MAPPING[kind]())
    settings.max_position_embeddings = 2048
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(settings)
    randomize(model)
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    return folder


@contextmanager
def serving(model: Path, rank: int = 4) -> Iterator[VllmServer]:
    args = ("--skip-tokenizer-init", *adapter_arguments(model))
    config = VllmConfig(max_context_tokens=2048, lora_rank=rank, lora_slots=2, args=args)
    with asyncio.Runner() as runner:
        server = VllmServer(config, model, log=model.parent / "vllm.log", dtype="float32")
        runner.run(server.start())
        try:
            yield server
        finally:
            runner.run(server.stop())


@pytest.fixture(scope="module", params=["qwen3", "llama"])
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Path, VllmServer]]:
    model = save_small(request.param, tmp_path_factory.mktemp(request.param) / "model")
    with serving(model) as server:
        yield model, server


def policy_of(model: Path, seed: int) -> Policy:
    """A policy with an adapter that changes every module."""
    config = ModelConfig(path=model, lora=LoraSettings(rank=4))
    policy = Policy(config, OptimizerConfig())
    disturb(policy, seed)
    return policy


def disturb(policy: Policy, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in policy.model.named_parameters():
            if ".lora_" in name:
                weight += 0.1 * torch.randn(weight.shape, generator=generator)


def push(sync: AdapterSync, policy: Policy, version: int) -> str:
    sync.push(policy.adapter(), adapter_config(policy.model), version)
    return sync.served_name


def score_ids(policy: Policy, ids: list[int] = IDS) -> list[float]:
    return policy.compute_logprobs(probe_batch(ids), temperature=1.0).logprobs.tolist()


def test_two_adapters_with_updates_of_both_are_exactly_the_trainers(
    served: tuple[Path, VllmServer], tmp_path: Path
) -> None:
    """Each update is compared for both policies on the same prompt, so that keys and values of
    another adapter, of another version or of the weights would be noticed."""
    model, server = served
    syncs = {name: AdapterSync(EngineControl([server.url]), tmp_path, name) for name in "ab"}
    policies = {name: policy_of(model, seed) for seed, name in enumerate(syncs)}
    base = Policy(ModelConfig(path=model))
    for version in (1, 2, 3):
        for name, sync in syncs.items():
            disturb(policies[name], 10 * version)
            push(sync, policies[name], version)
            for each, other in syncs.items():
                if other.served_name:
                    scores = score_ids(policies[each])
                    assert other.verify(IDS, scores, TOLERANCE) <= TOLERANCE
            (own,) = sync.control.prompt_logprobs(IDS)
            np.testing.assert_allclose(own, score_ids(base), atol=TOLERANCE)
        with pytest.raises(WeightSyncError, match="does not serve the trainer's weights"):
            syncs["a"].verify(IDS, score_ids(policies["b"]), TOLERANCE)
    loaded = [each for each in listed(server) if "@" in each]
    assert sorted(each.partition(".")[0] for each in loaded) == ["a@2", "a@3", "b@2", "b@3"]
    for sync in syncs.values():
        sync.close()


def listed(server: VllmServer) -> list[str]:
    address, _, rest = server.url.partition("://:")
    key, _, host = rest.partition("@")
    request = urllib.request.Request(
        f"{address}://{host}/v1/models", headers={"Authorization": f"Bearer {key}"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        return [each["id"] for each in json.load(response)["data"]]


def test_answer_in_flight_continues_with_the_new_version_exactly(
    served: tuple[Path, VllmServer], tmp_path: Path
) -> None:
    """The recorded log-probabilities of each part are those of the adapter of its version. A third
    version is loaded while the engine samples."""
    model, server = served
    sync = AdapterSync(EngineControl([server.url]), tmp_path, "policy")
    policies = [policy_of(model, seed) for seed in (1, 2, 3)]
    versions = [
        ServedPolicy("policy", number, push(sync, policy, number))
        for number, policy in enumerate(policies[:2], 1)
    ]
    sampled: list[int] = []
    recorded: list[float] = []
    seams: list[Seam] = []

    async def sample() -> tuple[VersionSpan, ...]:
        router = Router([VllmEngine(server.url)], vocab_size=128)
        await router.start()
        await router.publish(versions[0])
        sampling = Sampling(max_tokens=ANSWER_TOKENS, policy="policy", trained=True)
        prompt = np.array(IDS, np.int32)
        generation = Generation(router, prompt, sampling, request_id="s#0", session_id="s")
        async with aclosing(pieces_of(generation)) as stream:
            async for piece in stream:
                if isinstance(piece, Seam):
                    seams.append(piece)
                    await asyncio.to_thread(push, sync, policies[2], 3)
                    continue
                if not sampled:
                    await router.publish(versions[1])
                sampled.extend(piece.ids)
                recorded.extend(piece.logprobs)
        await router.close()
        return generation.versions

    first, second = asyncio.run(sample())
    assert [seam.cause for seam in seams] == [Cause.UPDATED]
    assert (first.version, second.version, second.end) == (1, 2, ANSWER_TOKENS)
    assert first.end == second.start == seams[0].at_token
    old, new = (score_ids(policy, [*IDS, *sampled])[-ANSWER_TOKENS:] for policy in policies[:2])
    np.testing.assert_allclose(recorded[: first.end], old[: first.end], atol=TOLERANCE)
    np.testing.assert_allclose(recorded[first.end :], new[first.end :], atol=TOLERANCE)
    assert np.abs(np.array(recorded) - old)[first.end :].mean() > 10 * TOLERANCE
    sync.close()


def test_update_is_compared_while_other_calls_run(
    served: tuple[Path, VllmServer], tmp_path: Path
) -> None:
    """Calls of several policies and of the engine's own weights are in the batch of the probe."""
    model, server = served
    policy = policy_of(model, 5)
    sync = AdapterSync(EngineControl([server.url]), tmp_path, "busy")
    name, scores = push(sync, policy, 1), score_ids(policy)

    async def sample(adapter: str) -> None:
        engine = VllmEngine(server.url)
        sampling = Sampling(max_tokens=ANSWER_TOKENS, adapter=adapter)
        prompt = np.array(IDS, np.int32)
        chunks = chunks_of(engine, prompt, sampling, request_id=f"s#{adapter}", stream=True)
        async with aclosing(chunks):
            async for _ in chunks:
                begun.release()
        await engine.close()

    async def compare() -> list[float]:
        async with asyncio.TaskGroup() as running:
            calls = [running.create_task(sample(adapter)) for adapter in (name, "")]
            for _ in calls:
                await begun.acquire()
            return [await asyncio.to_thread(sync.verify, IDS, scores, TOLERANCE) for _ in range(3)]

    begun = asyncio.Semaphore(0)
    assert max(asyncio.run(compare())) <= TOLERANCE
    sync.close()


def test_refusal_of_an_adapter_names_the_reason(
    served: tuple[Path, VllmServer], tmp_path: Path
) -> None:
    model, server = served
    sync = AdapterSync(EngineControl([server.url]), tmp_path, "policy")
    config = ModelConfig(path=model, lora=LoraSettings(rank=16))
    policy = Policy(config, OptimizerConfig())
    with pytest.raises(WeightSyncError, match="LoRA rank 16 is greater than max_lora_rank 8"):
        push(sync, policy, 1)
    assert sync.served_name == ""
    sync.close()
