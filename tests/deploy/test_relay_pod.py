"""The pods of the overlays `relay/proxy`, `relay/workers` and `relay/train`, run as processes
(`pod.py`).

The engine gets the weights that a run publishes, with nothing but what the manifests give the pods.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import aiohttp
import fsspec
import pytest
import yaml

from proxy.client import ProxyClient
from proxy.engines.vllm_server import VllmConfig, asked_environment
from proxy.run_files.files import read_jsonl
from tests.clouds import NO_GCS, NO_S3, amazon
from tests.deploy.isolation import skip_without_mounts
from tests.deploy.manifests import ROOT, needs_tools
from tests.deploy.pod import Pod, Site, running_pod
from tests.e2e.test_relay_training import configured
from tests.e2e.test_relay_weights import Home, check_turn
from tests.e2e.test_weight_sync import TOLERANCE, policy_of
from tests.file_server import serving_files
from tests.namespaces import machines
from tests.needs import needs
from tests.proxy.extras.relay.weights_engine import Publications
from trainer.extras.relay.published_weights import Publisher

pytestmark = needs_tools
KEYS = {"admin-key": "an-admin-key-of-the-tests", "relay-token": "a-token-of-the-relay"}
SECRETS = {
    "agentic-secrets": KEYS,
    "agentic-metrics-key": {"metrics-key": "a-metrics-key"},
    "agentic-worker-secrets": {"relay-token": KEYS["relay-token"]},
    "agentic-proxy-key": {"admin-key": KEYS["admin-key"]},
    "agentic-harbor": {"harbor-token": "a-token-of-harbor-server"},
}
WITHOUT_MODEL = """
from aiohttp import web
from tests.proxy.extras.relay.weights_engine import WeightsEngine
engine = WeightsEngine(lambda _: [5, 2])
web.run_app(engine.build_app(), host="127.0.0.1", port=8001, print=None)
"""
"""An engine that takes weights from files and computes nothing."""
ON_A_CPU = ("--dtype=float32", "--enforce-eager", "--max-model-len=512", "--max-num-seqs=4")


@dataclass(frozen=True, slots=True)
class Relay:
    """The running pod of the proxy, and what starts one of a worker."""

    control: ProxyClient
    host: str
    """The address of this machine, as the pods reach it."""
    start: Callable[[Site], AbstractAsyncContextManager[Pod]]
    """Starts a worker."""
    start_run: Callable[[Site], AbstractAsyncContextManager[Pod]]
    site: Site

    async def ready(self, pod: Pod) -> None:
        """Returns when the proxy has the worker of the pod."""
        async with asyncio.timeout(60):
            while not await self.control.ready():
                pod.check()
                await asyncio.sleep(0.1)

    async def served(self, publication: str) -> None:
        """Returns when the worker serves the publication."""
        async with asyncio.timeout(60):
            while True:
                view = await self.control.weights(wait_s=20)
                if view["publication"] == publication and view["settled"]:
                    (worker,) = view["workers"]
                    assert worker["serves_wanted"], worker
                    return

    async def versions(self) -> list[int]:
        """The versions that a call is recorded with."""
        session = await self.control.create_session()
        body = {"messages": [{"role": "user", "content": "Hi."}], "max_tokens": 8}
        headers = {"Authorization": f"Bearer {session.api_key}"}
        async with (
            aiohttp.ClientSession() as http,
            http.post(f"{session.base_url}/chat/completions", json=body, headers=headers) as answer,
        ):
            assert answer.status == 200, await answer.text()
        _, (turn,) = await self.control.get_turns(session.trial_id)
        return [span.version for span in turn.versions]


@asynccontextmanager
async def relay(model: Path, folder: Path) -> AsyncIterator[Relay]:
    """The pod of overlay `relay/proxy`, on a machine of its own like the worker's."""
    skip_without_mounts()
    shutil.copytree(model, folder / "model", copy_function=shutil.copyfile)  # readable by all
    (folder / "model").chmod(0o755)
    claims = {f"agentic-{name}": folder / name for name in ("model", "sessions", "tasks", "runs")}
    with machines(3) as ((proxy, address), (worker, _), (run, _)):
        reached = {"proxy.example.org": f"{address}:8000", "wss:": "ws:", "https:": "http:"}
        site = Site(claims, SECRETS, edits=reached)

        def start(site: Site) -> AbstractAsyncContextManager[Pod]:
            return running_pod("relay/workers", "Deployment/agentic-worker", worker, site, folder)

        def start_run(site: Site) -> AbstractAsyncContextManager[Pod]:
            return running_pod("relay/train", "Job/agentic-train", run, site, folder)

        async with (
            running_pod("relay/proxy", "Deployment/agentic-proxy", proxy, site, folder),
            ProxyClient(f"http://{address}:8000", KEYS["admin-key"]) as control,
        ):
            host = address.rpartition(".")[0] + ".1"
            yield Relay(control, host, start, start_run, site)


def without_model(site: Site, weights: str) -> Site:
    """With an engine that computes nothing, and weights at this URL."""
    return replace(
        site,
        edits={**site.edits, "s3://bucket/weights": weights},
        commands={"vllm": ("python3", "-c", WITHOUT_MODEL)},
        variables={"PYTHONPATH": str(ROOT)},
    )


async def test_worker_pulls_weights_into_the_engine_of_its_pod(
    tiny_model: Path, tmp_path: Path
) -> None:
    async with (
        relay(tiny_model, tmp_path) as found,
        serving_files(tmp_path / "published", found.host) as server,
        found.start(without_model(found.site, server.url)) as pod,
    ):
        await found.ready(pod)
        assert await found.versions() == [0]  # a fixed model, until a run publishes
        published = Publications(tmp_path / "published", server)
        for version, content in ((3, b"first weights"), (4, b"second weights")):
            name = published.add(version, content)
            await found.control.publish_weights(publication=name, version=version, run="a")
            await found.served(name)
            assert await found.versions() == [version]
        statuses = await pod.stop()
        assert statuses["worker"] == 0


@pytest.mark.long
@needs(NO_S3)
async def test_engine_of_the_pod_serves_the_weights_that_a_run_publishes_at_s3(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a real vLLM, and the credentials only in the secret."""
    async with relay(tiny_model, tmp_path) as found:
        with amazon(monkeypatch, found.host) as bucket:
            site = with_s3(found.site, bucket)
            publisher = Publisher(f"{bucket}/weights", "run-a", tmp_path / "run", full_every=3)
            async with found.start(site) as pod, aiohttp.ClientSession() as http:
                await found.ready(pod)
                trainer = Home(found.control, http, policy_of(tiny_model), publisher)
                for turn in await trainer.call():  # the model's own weights
                    assert check_turn(turn, {0: trainer.policy}) == {0}
                for version in (1, 2):
                    trainer.step(version)
                    sent = await asyncio.to_thread(trainer.publish, version)
                    await trainer.announce(sent)
                    (worker,) = await trainer.served(sent, [pod])
                    assert worker["difference"] <= TOLERANCE
                    pulled = sent.full_bytes if version == 1 else sent.delta_bytes
                    assert worker["pulled_bytes"] == pulled
                    for turn in await trainer.call():
                        assert check_turn(turn, {version: trainer.policy}) == {version}
                statuses = await pod.stop()
            publisher.close()
    assert statuses == {"worker": 0, "vllm": 0}


@pytest.mark.long
@needs(NO_S3)
async def test_run_of_the_overlay_trains_the_engine_of_the_worker(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The three overlays together: proxy, worker with a real vLLM, and `agentic-train`."""
    async with relay(tiny_model, tmp_path) as found:
        with amazon(monkeypatch, found.host) as bucket:
            site = with_s3(found.site, bucket)
            (tmp_path / "tasks").mkdir()
            text = run_of(tiny_model, tmp_path / "tasks")
            run = replace(
                site,
                config_maps={"agentic-train": {"agentic_trainer.yaml": text}},
                edits={**site.edits, "trainer.ranks=8": "trainer.ranks=1"},
            )
            async with found.start(site) as worker:
                await found.ready(worker)
                async with found.start_run(run) as trainer:
                    status = await trainer.wait("trainer")
                    assert status == 0, trainer.log("trainer").read_text()[-4000:]
    steps = list(read_jsonl(tmp_path / "runs/first/metrics.jsonl"))
    assert [line["step"] for line in steps if "sync/pull_s" in line] == [1, 2]
    for line in steps:
        assert line["mismatch/logp_abs_mean"] < TOLERANCE
        assert line["sync/probe_abs_mean"] < TOLERANCE


@pytest.mark.long
@needs(NO_GCS)
def test_key_of_a_service_account_in_the_secret_is_what_gs_uses(tmp_path: Path) -> None:
    """As docs/kubernetes.md describes it; no token is asked for."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import rsa

    key = rsa.generate_private_key(public_exponent=65537, key_size=2048).private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    account = {
        "type": "service_account",
        "client_email": "worker@project.example.org",
        "private_key": key.decode(),
        "token_uri": "https://oauth2.example.org/token",
    }
    (tmp_path / "google-key").write_text(json.dumps(account))
    access = {"gs": {"token": str(tmp_path / "google-key")}}
    (tmp_path / "fsspec.json").write_text(json.dumps(access))
    program = """
from proxy.extras.relay.weights.file_system import FileSystem
print(FileSystem.at("gs://bucket/weights").files.credentials.credentials.service_account_email)
"""
    found = subprocess.run(
        [sys.executable, "-c", program],
        env={"FSSPEC_CONFIG_DIR": str(tmp_path)},
        check=True,
        capture_output=True,
        text=True,
    )
    assert found.stdout.strip() == account["client_email"]


def run_of(model: Path, tasks: Path) -> str:
    """The configuration of two steps, with its tasks and its agent in `tasks`."""
    path, _ = configured(model, tasks, "float32", 2)
    settings = yaml.safe_load(path.read_text().replace(str(tasks), "/tasks"))
    for key in ("replicas", "publish"):  # the command of the overlay sets them
        del settings["engine"][key]
    del settings["relay"]
    settings["model"]["path"] = "/model"
    settings["trainer"] |= {"run_dir": "/runs/first", "resume": "auto"}
    return yaml.safe_dump(settings)


def with_s3(site: Site, bucket: str) -> Site:
    """With a vLLM on a CPU, and weights in this bucket, of which the secret has the credentials."""
    access = fsspec.config.conf["s3"] | {"key": "test", "secret": "test"}
    return replace(
        site,
        secrets={**SECRETS, "agentic-weights": {"fsspec.json": json.dumps({"s3": access})}},
        edits={**site.edits, "s3://bucket": bucket},
        variables=asked_environment(VllmConfig()) | {"OMP_NUM_THREADS": "1"},
        arguments={"vllm": ON_A_CPU},
    )
