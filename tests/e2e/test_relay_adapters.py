"""Engines that only their relay workers reach pull the versions of an adapter, without a pause.

As in `test_relay_weights.py`, each real vLLM and its worker are in a network namespace of their
own.
"""

from __future__ import annotations

import asyncio
import shutil
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from proxy.engines.vllm_server import VllmConfig
from proxy.extras.relay.weights.publication import ADAPTER_FILE, ProbeScores
from proxy.records import Turn
from tests.e2e.test_adapter_sync import disturb, policy_of
from tests.e2e.test_gloo_engines import START_TIMEOUT_S
from tests.e2e.test_relay_weights import Home, Site, check_turn, home
from tests.e2e.test_weight_sync import IDS, TOLERANCE, score_ids
from tests.e2e.test_weight_sync import policy_of as whole_policy_of
from tests.file_server import serving_files
from tests.namespaces import machines
from trainer.extras.relay.published_adapters import AdapterPublisher
from trainer.policy.adapter import RandomAdapter, adapter_arguments, adapter_config
from trainer.policy.policy import Policy
from trainer.weight_sync.published import Published

POLICY = "shop"


class Publishing:
    """The trainer's side: an adapter in training, and its versions."""

    def __init__(self, trainer: Home, model: Path, url: str) -> None:
        self._trainer = trainer
        self._model = model
        self.policy = policy_of(model, 1)
        self.policies: dict[int, Policy] = {}
        self._publisher = AdapterPublisher(url, "run-a", POLICY)
        random = RandomAdapter(self.policy.model)
        random.enter()
        self._publisher.publish_test(
            self.policy.adapter(),
            adapter_config(self.policy.model),
            self._scores(whole_policy_of(model)),
            self._scores(self.policy),
        )
        random.leave()

    def publish(self, version: int) -> Published:
        disturb(self.policy, 10 * version)
        self.policies[version] = policy_of(self._model, 0)
        self.policies[version].model.load_state_dict(self.policy.model.state_dict())
        config, probe = adapter_config(self.policy.model), self._scores(self.policy)
        return self._publisher.publish(self.policy.adapter(), config, version, probe)

    async def sample_from(self, sent: Published, sites: list[Site]) -> list[dict[str, object]]:
        """As a run does: the workers get it first. Returns what they say."""
        await self._trainer.announce(sent)
        workers = await self._trainer.served(sent, sites)
        served = sent.served
        assert served is not None
        await self._trainer.control.publish_policy(served.name, served.version, served.adapter, "a")
        return workers

    def _scores(self, policy: Policy) -> ProbeScores:
        return ProbeScores(tuple(IDS), tuple(score_ids(policy, IDS)), TOLERANCE)


@pytest.mark.long
async def test_engines_behind_the_relay_serve_every_version_of_an_adapter(
    tiny_model: Path, tmp_path: Path
) -> None:
    async with AsyncExitStack() as stack:
        names = stack.enter_context(machines(3))
        host = names[0][1].rpartition(".")[0] + ".1"
        trainer, proxy = await stack.enter_async_context(home(tiny_model, tmp_path, host))
        files = await stack.enter_async_context(serving_files(tmp_path / "published", host))
        reached = {"proxy": proxy, "published": files.url}
        config = VllmConfig(
            max_context_tokens=512,
            max_sequences=4,
            lora_rank=4,
            start_timeout_s=START_TIMEOUT_S,
            args=tuple(adapter_arguments(tiny_model)),
        )
        first = Site(names[0][0], config, tiny_model, tmp_path, **reached)
        stack.callback(first.close)
        training = Publishing(trainer, tiny_model, f"file://{tmp_path}/published")
        await first.start_engine()
        first.start_worker()
        calling, turns = True, list[Turn]()

        async def agent() -> None:
            while calling:
                turns.extend(await trainer.call(POLICY))

        await training.sample_from(await asyncio.to_thread(training.publish, 1), [first])
        agents = [asyncio.create_task(agent()) for _ in range(3)]
        for version in (2, 3, 4, 5):
            sent = await asyncio.to_thread(training.publish, version)
            (worker,) = await training.sample_from(sent, [first])
            print(
                f"version {version}: {sent.size_bytes} bytes, {worker['pulled_bytes']} pulled in "
                f"{worker['pull_s']:.3f} s, paused for {worker['paused_s']} s, mean |Δ log p| "
                f"{worker['difference']:.1e}"
            )
            assert worker["pulled_bytes"] == sent.size_bytes
            assert worker["paused_s"] == 0
        calling = False
        await asyncio.gather(*agents)
        found = [check_turn(turn, training.policies) for turn in turns]
        print(f"{len(turns)} turns, {sum(len(each) > 1 for each in found)} across an update")
        assert any(len(each) > 1 for each in found)
        for turn in await trainer.call():  # the engine's own weights
            assert check_turn(turn, {0: whole_policy_of(tiny_model)}) == {0}

        # The worker is killed in the middle of a pull, which begins again with the next worker.
        sent = training.publish(6)
        assert sent.served is not None
        files.hold(tmp_path / "published" / sent.name / ADAPTER_FILE)
        await trainer.announce(sent)
        await files.asked.wait()
        first.kill_worker()
        await files.left.wait()
        files.release()
        first.start_worker()
        await training.sample_from(sent, [first])
        for turn in await trainer.call(POLICY):
            assert check_turn(turn, training.policies) == {6}

        # An engine that joins late, and one with other weights of the same architecture.
        late, other = (
            Site(name, config, model, tmp_path, **reached)
            for (name, _), model in zip(
                names[1:], (tiny_model, changed(tiny_model, tmp_path / "other")), strict=True
            )
        )
        for site in (late, other):
            stack.callback(site.close)
            await site.start_engine()
        late.start_worker()
        await trainer.served(sent, [first, late])
        first.kill_worker()
        async with asyncio.timeout(60):
            while len(await trainer.control.engines()) > 1:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        for turn in await trainer.call(POLICY):
            assert check_turn(turn, training.policies) == {6}
        other.start_worker()
        refused = f"other weights than those to which the adapter {sent.served.adapter} belongs"
        async with asyncio.timeout(60):
            while refused not in other.log.read_text():  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        healthy = {each["name"]: each["healthy"] for each in await trainer.control.engines()}
        assert healthy == {names[1][0]: True, names[2][0]: False}


def changed(model: Path, folder: Path) -> Path:
    """A checkpoint like this one, with other weights."""
    shutil.copytree(model, folder)
    (file,) = folder.glob("*.safetensors")
    generator = torch.Generator().manual_seed(3)
    weights = {
        name: tensor + 0.05 * torch.randn(tensor.shape, generator=generator)
        for name, tensor in load_file(file).items()
    }
    save_file(weights, file, metadata={"format": "pt"})
    return folder
