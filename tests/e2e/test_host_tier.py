"""Keys and values in a host tier: the same answers, and none of old weights after an update.

The engine is a real vLLM with its own offloading connector; `host_tier` makes the copies.
"""

from __future__ import annotations

import asyncio
import json
import re
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from proxy.engines.address import EngineAddress
from proxy.engines.vllm import VllmEngine
from proxy.engines.vllm_server import VllmConfig, VllmServer
from tests.e2e.test_weight_sync import disturb, policy_of, score_ids
from tests.e2e.tiered_server import tiered_arguments
from trainer.weight_sync.control import EngineControl
from trainer.weight_sync.sync import WeightSync

pytestmark = [pytest.mark.engine, pytest.mark.long]

BLOCK, BLOCKS = 32, 64
LOAD_S = 1.0
"""How long a load takes, so that an update can begin in the middle of one."""
ANSWER = 8
PROMPTS = np.random.default_rng(0).integers(3, 290, (6, 640)).tolist()
"""Twice as many tokens as the KV cache holds: no path is in it when its prompt comes again."""


@pytest.fixture(scope="module")
def server(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[VllmServer, EngineAddress]]:
    args = ("--num-gpu-blocks-override", str(BLOCKS), "--block-size", str(BLOCK))
    config = VllmConfig(
        max_context_tokens=1024,
        args=(*args, *tiered_arguments(gib=0.25, load_s=LOAD_S)),
        weight_transfer="shm",
    )
    log = tmp_path_factory.mktemp("tier") / "vllm.log"
    with asyncio.Runner() as runner:
        vllm = VllmServer(config, tiny_model, log=log, dtype="float32")
        runner.run(vllm.start())
        yield vllm, EngineAddress.parse(vllm.url)
        runner.run(vllm.stop())


def fetched(address: EngineAddress, path: str, body: object = None) -> str:
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json", **address.headers}
    request = urllib.request.Request(address.url + path, data, headers)
    with urllib.request.urlopen(request) as response:
        return str(response.read().decode())


def sampled(address: EngineAddress, prompt: list[int]) -> tuple[list[int], list[float]]:
    """The ids of the greedy answer, and their log-probabilities."""
    params = {"max_tokens": ANSWER, "temperature": 0.0, "logprobs": 0, "ignore_eos": True}
    body = {"token_ids": prompt, "sampling_params": params}
    (choice,) = json.loads(fetched(address, "/inference/v1/generate", body))["choices"]
    return choice["token_ids"], [each["logprob"] for each in choice["logprobs"]["content"]]


def from_host(address: EngineAddress) -> int:
    """Number of prompt tokens that the engine has taken from its host tier."""
    found = re.findall(
        r"^vllm:external_prefix_cache_hits_total\S* (\S+)", fetched(address, "/metrics"), re.M
    )
    return int(sum(map(float, found)))


def test_paths_in_the_host_tier_give_the_same_answers_and_count_as_cache(
    server: tuple[VllmServer, EngineAddress],
) -> None:
    vllm, address = server
    computed = [sampled(address, prompt) for prompt in PROMPTS]
    before = from_host(address)
    loaded = [sampled(address, prompt) for prompt in PROMPTS]
    assert from_host(address) - before >= len(PROMPTS) * (len(PROMPTS[0]) - BLOCK)
    for (ids, logprobs), (ids_again, logprobs_again) in zip(computed, loaded, strict=True):
        assert ids == ids_again
        np.testing.assert_allclose(logprobs, logprobs_again, atol=1e-4)

    async def cache_tokens() -> int | None:
        engine = VllmEngine(vllm.url)
        await engine.check()
        await engine.close()
        return engine.info.cache_tokens

    assert (asyncio.run(cache_tokens()) or 0) > 10 * BLOCK * BLOCKS


def test_no_keys_of_old_weights_are_loaded_after_an_update(
    server: tuple[VllmServer, EngineAddress], tiny_model: Path
) -> None:
    vllm, address = server
    policy = policy_of(tiny_model)
    sync = WeightSync(EngineControl([vllm.url]))
    for prompt in PROMPTS[:2]:
        sampled(address, prompt)
    for version in (1, 2):
        disturb(policy, version)
        sync.push(policy.named_hf_parameters(), version)
        before = from_host(address)
        for prompt in PROMPTS[:2]:
            ids, logprobs = sampled(address, prompt)
            ours = score_ids(policy, prompt + ids)[-ANSWER:]
            np.testing.assert_allclose(logprobs, ours, atol=1e-3)
        assert from_host(address) == before
    sync.close()


def test_update_during_a_load_waits_for_it(
    server: tuple[VllmServer, EngineAddress], tiny_model: Path
) -> None:
    vllm, address = server
    policy = policy_of(tiny_model)
    sync = WeightSync(EngineControl([vllm.url]))
    for prompt in PROMPTS:
        sampled(address, prompt)
    before = from_host(address)
    with ThreadPoolExecutor(1) as beside:
        call = beside.submit(sampled, address, PROMPTS[0])
        while from_host(address) == before:  # it is counted when the load begins
            assert not call.done()
        disturb(policy, 7)
        sync.push(policy.named_hf_parameters(), 7)
        assert len(call.result()[0]) == ANSWER
    ids, logprobs = sampled(address, PROMPTS[0])
    ours = score_ids(policy, PROMPTS[0] + ids)[-ANSWER:]
    np.testing.assert_allclose(logprobs, ours, atol=1e-3)
    sync.close()
