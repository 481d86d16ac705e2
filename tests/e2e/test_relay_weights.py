"""Engines that only their relay workers reach pull the versions that a trainer publishes.

Each engine, a real vLLM, and its worker are in a network namespace of their own, in which the
engine listens on the loopback address: neither the proxy nor the trainer can connect to it.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
from aiohttp import web
from pydantic import SecretStr

from proxy.app import build_app
from proxy.client import ProxyClient
from proxy.config import load_config
from proxy.engines.vllm_server import VllmConfig, VllmServer
from proxy.extras.relay.weights.publication import ProbeScores
from proxy.http.server import app_runner
from proxy.records import Turn, TurnStatus
from tests.e2e.test_gloo_engines import START_TIMEOUT_S
from tests.e2e.test_weight_sync import IDS, TOLERANCE, policy_of, score_ids
from tests.file_server import serving_files
from tests.namespaces import enter, machines
from tests.proxy.conftest import ADMIN_KEY
from trainer.extras.relay.published_weights import Publisher, described
from trainer.policy.policy import Policy
from trainer.weight_sync.control import EngineControl
from trainer.weight_sync.published import Published

TOKEN = "a-token-of-the-relay"


def config_with(workers: int) -> VllmConfig:
    """Of an engine with so many workers (tensor parallel)."""
    extension = ("--worker-extension-cls", "tests.e2e.weight_digest.WeightDigest")
    return VllmConfig(
        max_context_tokens=512,
        max_sequences=4,
        weight_transfer="shm",
        start_timeout_s=START_TIMEOUT_S,
        args=("--tensor-parallel-size", str(workers), *extension),
        env={"VLLM_CPU_OMP_THREADS_BIND": "nobind"} if workers > 1 else {},
    )


class Site:
    """A namespace with an engine, and a worker that connects to the proxy."""

    def __init__(
        self,
        name: str,
        config: VllmConfig,
        model: Path,
        folder: Path,
        *,
        proxy: str,
        published: str,
    ) -> None:
        self._name, self._config, self._model, self._folder = name, config, model, folder
        self._proxy, self._published = proxy, published
        self._thread = ThreadPoolExecutor(1, initializer=enter, initargs=(name,))
        self._runner = asyncio.Runner()
        self._server: VllmServer | None = None
        self._worker: subprocess.Popen[bytes] | None = None
        self.log = folder / f"{name}-worker.log"

    async def start_engine(self) -> None:
        def start() -> None:
            log = self._folder / f"{self._name}.log"
            self._server = VllmServer(self._config, self._model, log=log, dtype="float32")
            self._runner.run(self._server.start())

        await asyncio.wrap_future(self._thread.submit(start))

    def start_worker(self) -> None:
        def start() -> None:
            assert self._server is not None
            with self.log.open("ab") as log:
                self._worker = subprocess.Popen(
                    [
                        *(sys.executable, "-m", "proxy.extras.relay", "--proxy", self._proxy),
                        *("--engine", self._server.url, "--model", str(self._model)),
                        *("--name", self._name, "--weights-url", self._published),
                        *("--weights-folder", str(self._folder / f"{self._name}-weights")),
                    ],
                    env=os.environ | {"AGENTIC_WORKER_TOKEN": TOKEN},
                    stdout=log,
                    stderr=log,
                )

        self._thread.submit(start).result()

    def kill_worker(self) -> None:
        assert self._worker is not None
        self._worker.kill()
        self._worker.wait()

    def digest(self) -> tuple[str, ...]:
        """Of every weight with which the engine's workers compute."""

        def ask() -> tuple[str, ...]:
            assert self._server is not None
            control = EngineControl([self._server.url])
            try:
                return tuple(digest for (digest,) in control.call_workers("weight_digest"))
            finally:
                control.close()

        return self._thread.submit(ask).result()

    def close(self) -> None:
        if self._worker is not None:
            self.kill_worker()
        if self._server is not None:
            self._thread.submit(self._runner.run, self._server.stop()).result()
        self._thread.submit(self._runner.close).result()
        self._thread.shutdown()


@dataclass(frozen=True, slots=True)
class Home:
    """The trainer's side: it publishes, and tells the proxy."""

    control: ProxyClient
    http: aiohttp.ClientSession
    policy: Policy
    publisher: Publisher

    def step(self, seed: int) -> None:
        """Changes a few elements of the policy, as a step of training does after rounding."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.policy.model.parameters():
                chosen = torch.rand(parameter.shape, generator=generator) < 0.05
                parameter += 0.5 * chosen * torch.randn(parameter.shape, generator=generator)

    def publish(self, version: int) -> Published:
        shapes = self.policy.hf_shapes()
        probe = ProbeScores(tuple(IDS), tuple(score_ids(self.policy, IDS)), TOLERANCE)
        weights = self.policy.named_hf_parameters()
        return self.publisher.publish(weights, described(shapes, shapes), version, probe)

    async def announce(self, sent: Published) -> None:
        await self.control.publish_weights(publication=sent.name, version=sent.version, run="a")

    async def served(self, sent: Published, sites: Sequence[object]) -> list[dict[str, Any]]:
        """What the workers say once all of them serve the weights."""
        async with asyncio.timeout(120):
            while True:
                view = await self.control.weights(wait_s=20)
                workers: list[dict[str, Any]] = view["workers"]
                if len(workers) == len(sites) and all(each["serves_wanted"] for each in workers):
                    assert view["publication"] == sent.name
                    return workers

    async def call(self, policy: str = "") -> list[Turn]:
        """The record of a call with a long answer."""
        session = await self.control.create_session(
            sampling={"temperature": 1.0}, policies={"": policy} if policy else None
        )
        body = {"messages": [{"role": "user", "content": "Say something."}], "max_tokens": 300}
        headers = {"Authorization": f"Bearer {session.api_key}"}
        target = f"{session.base_url}/chat/completions"
        async with self.http.post(target, json=body, headers=headers) as response:
            assert response.status == 200, await response.text()
        return (await self.control.get_turns(session.trial_id))[1]


@asynccontextmanager
async def home(model: Path, folder: Path, host: str) -> AsyncIterator[tuple[Home, str]]:
    config = load_config(
        model=model,
        engines=[],
        store=f"sqlite:///{folder}/proxy.db",
        admin_key=ADMIN_KEY,
        host=host,
        relay={"token": SecretStr(TOKEN), "grace_s": 1.0},
    )
    runner = app_runner(build_app(config), handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, host, 0).start()
    address = f"{host}:{runner.addresses[0][1]}"
    publisher = Publisher(f"file://{folder}/published", "run-a", folder / "scratch", full_every=3)
    async with (
        ProxyClient(f"http://{address}", ADMIN_KEY) as control,
        aiohttp.ClientSession() as http,
    ):
        yield Home(control, http, policy_of(model), publisher), f"ws://{address}"
    publisher.close()
    await runner.cleanup()


def check_turn(turn: Turn, policies: dict[int, Policy]) -> set[int]:
    """Every token has the log-probability of the version that it is recorded with, computed by the
    trainer. Returns the versions."""
    assert turn.status is TurnStatus.DONE
    ends = [span.end for span in turn.versions]
    assert [span.start for span in turn.versions] == [0, *ends[:-1]]
    assert ends[-1] == len(turn.sampled_ids)
    ids = [*turn.prompt_ids.tolist(), *turn.sampled_ids.tolist()]
    prompt = len(turn.prompt_ids)
    for span in turn.versions:
        scores = score_ids(policies[span.version], ids)[prompt - 1 :]
        for at in range(span.start, span.end):
            assert abs(scores[at] - float(turn.logprobs[at])) < 20 * TOLERANCE
    return {span.version for span in turn.versions}


@pytest.mark.long
@pytest.mark.parametrize("workers", [1, 2])
async def test_engines_behind_the_relay_serve_every_published_version(
    tiny_model: Path, tmp_path: Path, workers: int
) -> None:
    async with AsyncExitStack() as stack:
        names = stack.enter_context(machines(2))
        host = names[0][1].rpartition(".")[0] + ".1"
        trainer, proxy = await stack.enter_async_context(home(tiny_model, tmp_path, host))
        files = await stack.enter_async_context(serving_files(tmp_path / "published", host))
        reached = {"proxy": proxy, "published": files.url}
        config = config_with(workers)
        sites = [Site(name, config, tiny_model, tmp_path, **reached) for name, _ in names]
        for site in sites:
            stack.callback(site.close)
        first, late = sites
        await first.start_engine()

        # The worker joins before anything is published, and gets a full version, then deltas.
        first.start_worker()
        policies, digests = dict[int, Policy](), set[tuple[str, ...]]()
        sent = trainer.publish(1)
        assert sent.full_bytes > sent.size_bytes
        await trainer.announce(sent)
        (worker,) = await trainer.served(sent, [first])
        assert worker["pulled_bytes"] == sent.full_bytes
        calling, turns = True, list[Turn]()

        async def agent() -> None:
            while calling:
                turns.extend(await trainer.call())

        agents = [asyncio.create_task(agent()) for _ in range(3)]
        for version in (2, 3, 4):
            policies[version - 1] = policy_of(tiny_model)
            policies[version - 1].model.load_state_dict(trainer.policy.model.state_dict())
            trainer.step(version)
            sent = await asyncio.to_thread(trainer.publish, version)
            await trainer.announce(sent)
            (worker,) = await trainer.served(sent, [first])
            assert worker["pulled_bytes"] == sent.delta_bytes < 0.3 * sent.size_bytes
            assert worker["difference"] <= TOLERANCE
            print(
                f"version {version}: {sent.size_bytes} bytes, {worker['pulled_bytes']} pulled in "
                f"{worker['pull_s']:.3f} s, paused for {worker['paused_s']:.3f} s, mean |Δ log p| "
                f"{worker['difference']:.1e}"
            )
            digests.add(first.digest())
        calling = False
        await asyncio.gather(*agents)
        policies[4] = trainer.policy
        found = [check_turn(turn, policies) for turn in turns]
        print(f"{len(turns)} turns, {sum(len(each) > 1 for each in found)} across an update")
        assert any(len(each) > 1 for each in found)
        assert len(digests) == 3

        # The worker is killed in the middle of a pull, which begins again with the next worker.
        trainer.step(5)
        sent = trainer.publish(5)
        files.hold(tmp_path / "published" / sent.name / "delta-00000.bin")
        await trainer.announce(sent)
        await files.asked.wait()
        assert not (await trainer.control.weights())["settled"]
        first.kill_worker()
        await files.left.wait()
        files.release()
        first.start_worker()
        await trainer.served(sent, [first])
        policies[5] = trainer.policy
        for turn in await trainer.call():
            assert check_turn(turn, policies) == {5}

        # An engine that joins late has the same weights.
        await late.start_engine()
        assert late.digest() != first.digest()
        late.start_worker()
        serving = await trainer.served(sent, sites)
        assert {each["version"] for each in serving} == {5}
        assert late.digest() == first.digest()
        assert first.digest() not in digests
