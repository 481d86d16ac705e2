"""Relay workers that a run starts, as processes with a scripted engine, at a real proxy."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from pydantic import SecretStr, ValidationError

from proxy.client import ProxyClient, ProxyClientError
from tests.trainer.cluster.relay_processes import ALONE, SCRIPT
from tests.trainer.cluster.test_services import ScriptedTrainer
from tests.trainer.test_fit import config_of
from trainer.assembly import assemble
from trainer.cluster.local import LocalCluster
from trainer.cluster.services import RunServices
from trainer.config import TrainerConfig
from trainer.errors import ConfigError, TrainerError
from trainer.extras.relay.order import WorkerOrder
from trainer.extras.relay.worker_process import WorkerCommand
from trainer.extras.relay.workers import RelayWorkers
from trainer.run.control import RunControl, StopRequested
from trainer.run.folder import RunFolder

END_S = 20.0


def relay_config(model: Path, *argv: str, **relay: Any) -> TrainerConfig:
    count = relay.pop("count", 1)
    workers = [{"command": [*SCRIPT, *argv], "count": count, "env": {"WORKER": "w-{number}"}}]
    return config_of(model, engine=ALONE, relay={"workers": workers} | relay)


@asynccontextmanager
async def running(
    config: TrainerConfig, folder: RunFolder, said: Callable[[str], None]
) -> AsyncIterator[tuple[ProxyClient, RunControl]]:
    control = RunControl()
    cluster = LocalCluster(config, folder, control)
    rank_zero = ScriptedTrainer().rank_zero
    async with RunServices(config, folder, control, cluster, rank_zero, said).running() as services:
        yield services.proxy, control


_before: set[psutil.Process] = set()
"""What this process had started before the test: servers that tests share."""


@pytest.fixture(autouse=True)
def before() -> None:
    _before.clear()
    _before.update(psutil.Process().children())


def own_processes() -> list[psutil.Process]:
    """Those that the test has started, and all below them."""
    own = [each for each in psutil.Process().children() if each not in _before]
    return own + [below for each in own for below in each.children(recursive=True)]


def nodes() -> dict[str, psutil.Process]:
    """The processes of the test's workers, by what `WORKER` is in their environment."""
    found = {}
    for process in own_processes():
        if process.cmdline()[: len(SCRIPT)] == [*SCRIPT]:
            found[process.environ()["WORKER"]] = process
    return found


def assert_all_end(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, END_S)
    assert not alive


async def test_workers_connect_are_replaced_when_they_end_and_end_with_the_run(
    tiny_model: Path, tmp_path: Path
) -> None:
    folder, said = RunFolder.create(tmp_path / "run"), asyncio.Queue[str]()
    config = relay_config(tiny_model, count=2)
    async with running(config, folder, said.put_nowait) as (proxy, _):
        started = nodes()
        assert sorted(started) == ["w-0", "w-1"]
        assert {each["name"] for each in await proxy.engines()} == {"relay-0", "relay-1"}
        token_file = folder.path / "relay-token"
        assert token_file.stat().st_mode & 0o777 == 0o600
        token = token_file.read_text().strip()
        seen = [" ".join(each.cmdline()) for each in own_processes()]
        assert not any(token in line for line in seen)
        started["w-1"].kill()
        lines = [said.get_nowait() for _ in range(3)]
        assert lines[0].startswith("relay: starting 2 workers, which connect to ws://127.0.0.1:")
        assert lines[2].endswith("is connected (2 of 2 workers)")
        assert (await said.get()).startswith("warning: relay-1 ended with exit code 137: ")
        assert (await said.get()).startswith("relay: relay-1.2 is connected")
        assert "relay-1.2" in {each["name"] for each in await proxy.engines()}
        left = own_processes()
    assert_all_end(left)
    assert not token_file.exists()
    assert token not in "".join(log.read_text() for log in folder.logs.iterdir())


async def test_workers_get_the_url_of_the_weights_without_its_credentials(
    tiny_model: Path, tmp_path: Path
) -> None:
    engine = ALONE | {"publish": "http://user:secret@127.0.0.1:1/weights"}
    workers = [
        {"command": [*SCRIPT], "env": {"WORKER": "of-run"}},
        {
            "command": [*SCRIPT],
            "env": {"WORKER": "of-site", "AGENTIC_WORKER_WEIGHTS_URL": "file:///mnt/{number}"},
        },
    ]
    config = config_of(tiny_model, engine=engine, relay={"workers": workers})
    folder = RunFolder.create(tmp_path / "run")
    async with running(config, folder, lambda _: None):
        urls = {name: n.environ()["AGENTIC_WORKER_WEIGHTS_URL"] for name, n in nodes().items()}
    assert urls == {"of-run": "http://127.0.0.1:1/weights", "of-site": "file:///mnt/0"}


def test_training_with_workers_needs_a_place_for_the_weights(tiny_model: Path) -> None:
    with pytest.raises(ConfigError, match=r"set engine\.publish to a URL"):
        assemble(relay_config(tiny_model))


@pytest.mark.parametrize(
    ("mode", "relay", "message"),
    [
        ("no-gpu", {}, r"relay-0 ended with exit code 3: .*no CUDA device \(log: .*relay-0\.log"),
        ("silent", {"start_timeout_s": 3}, r"relay-0 was not connected within 3 s .*still loading"),
    ],
)
async def test_worker_that_never_connects_ends_the_run_with_the_end_of_its_log(
    tiny_model: Path, tmp_path: Path, mode: str, relay: dict[str, float], message: str
) -> None:
    folder = RunFolder.create(tmp_path / "run")
    with pytest.raises(TrainerError, match=message):
        async with running(relay_config(tiny_model, mode, **relay), folder, print):
            pass
    assert not nodes()


async def test_run_that_is_stopped_while_workers_start_ends_them(
    tiny_model: Path, tmp_path: Path
) -> None:
    folder, control = RunFolder.create(tmp_path / "run"), RunControl()
    config = relay_config(tiny_model, "silent")
    cluster, trainer = LocalCluster(config, folder, control), ScriptedTrainer()
    started: list[psutil.Process] = []

    def said(line: str) -> None:
        assert line.startswith("relay: starting 1 workers")
        asyncio.get_running_loop().create_task(stop_once_started())

    async def stop_once_started() -> None:
        await asyncio.to_thread(_wait_for_line, folder.logs / "relay-0.log")
        started.extend(own_processes())
        control.request_stop(signal.SIGINT)

    services = RunServices(config, folder, control, cluster, trainer.rank_zero, said)
    with pytest.raises(StopRequested):
        await services.running().__aenter__()
    assert len(started) >= 4  # the proxy, the command, and their guards
    assert_all_end(started)
    assert not (folder.path / "relay-token").exists()


async def test_workers_end_with_a_run_whose_proxy_fails(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def failing(_: ProxyClient) -> list[dict[str, Any]]:
        raise ProxyClientError("the store failed", 500)

    monkeypatch.setattr(ProxyClient, "engines", failing)
    folder, config = RunFolder.create(tmp_path / "run"), relay_config(tiny_model, "silent")
    workers = RelayWorkers(config, folder, LocalCluster(config, folder, RunControl()), print)
    url = "http://127.0.0.1:1"
    async with ProxyClient(url, "key") as client:
        try:
            with pytest.raises(ProxyClientError, match="the store failed"):
                await workers.start(url, client)
            started = own_processes()
            assert started
        finally:
            await workers.stop()
    assert_all_end(started)
    assert not (folder.path / "relay-token").exists()


async def test_worker_that_keeps_ending_ends_the_run(tiny_model: Path, tmp_path: Path) -> None:
    folder, said = RunFolder.create(tmp_path / "run"), asyncio.Queue[str]()
    config = relay_config(tiny_model, restarts=1)

    async def lose_it_twice() -> None:
        async with running(config, folder, said.put_nowait) as (_, control):
            nodes()["w-0"].kill()
            while "relay-0.2 is connected" not in await said.get():
                pass
            nodes()["w-0"].kill()
            await control.finish(asyncio.sleep(60))

    with pytest.raises(TrainerError, match=r"relay-0 ended 2 times \(relay\.restarts\)"):
        await lose_it_twice()
    assert not nodes()


async def test_log_does_not_contain_the_token_of_a_command_that_repeats_its_input(
    tmp_path: Path,
) -> None:
    order = order_of(tmp_path)
    worker = WorkerCommand([*SCRIPT, "repeat"], order, tmp_path / "log")
    await worker.start()
    how = await worker.wait()
    await worker.stop()
    assert how.startswith("exit code 1: ")
    assert '"token":"(relay token)"' in (tmp_path / "log").read_text()


# Takes the trainer's place: starts a worker by a command, and is killed.
TRAINER = """
import asyncio, sys
from pathlib import Path
from trainer.extras.relay.order import WorkerOrder
from trainer.extras.relay.worker_process import WorkerCommand

async def main():
    model, log = map(Path, sys.argv[1:3])
    order = WorkerOrder(proxy="ws://127.0.0.1:1", token="t", name="relay-0", model=model)
    await WorkerCommand(sys.argv[3:], order, log).start()
    await asyncio.Event().wait()

asyncio.run(main())
"""
# Takes the place of ssh: connects its standard streams with what the daemon starts.
SSH = """
import os, socket, sys
connection = socket.socket(socket.AF_UNIX)
connection.connect(sys.argv[1])
while data := os.read(0, 65536):
    connection.sendall(data)
"""


def test_worker_on_another_machine_ends_when_the_trainer_is_killed(
    tiny_model: Path, tmp_path: Path
) -> None:
    """The daemon, here this process, does not end what it started when a connection ends."""
    path = str(tmp_path / "daemon")
    with socket.socket(socket.AF_UNIX) as daemon:
        daemon.bind(path)
        daemon.listen()
        argv = [sys.executable, "-c", TRAINER, str(tiny_model), str(tmp_path / "log")]
        trainer = subprocess.Popen([*argv, sys.executable, "-c", SSH, path])
        connection, _ = daemon.accept()
    node = subprocess.Popen([*SCRIPT], stdin=connection.fileno(), stderr=subprocess.PIPE, text=True)
    connection.close()
    with node:
        assert node.stderr is not None
        while "reconnecting" not in (line := node.stderr.readline()):
            assert line, "the worker ended"
        below = psutil.Process(node.pid).children(recursive=True)
        assert len(below) == 2  # the engine and its guard
        trainer.kill()
        trainer.wait()
        assert node.wait(END_S) == 0
    assert_all_end(below)


def test_command_ends_when_the_trainer_is_killed(tiny_model: Path, tmp_path: Path) -> None:
    """Also one that does not read its standard input."""
    argv = [sys.executable, "-c", TRAINER, str(tiny_model), str(tmp_path / "log")]
    with subprocess.Popen([*argv, *SCRIPT, "silent"]) as trainer:
        _wait_for_line(tmp_path / "log")
        below = psutil.Process(trainer.pid).children(recursive=True)
        assert [*SCRIPT, "silent"] in [each.cmdline() for each in below]
        trainer.kill()
    assert_all_end(below)


def test_weights_of_killed_workers_are_removed_by_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trainer.extras.relay.node import own_folder

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def weights_of(folder: Path) -> Path:
        (folder / "weights").mkdir()
        return folder / "weights"

    killed = tmp_path / "agentic-worker-killed"
    killed.mkdir()
    (killed / "lock").touch()
    left = weights_of(killed)
    with own_folder() as alive:
        kept = weights_of(alive)
        assert not left.exists()
        with own_folder():
            assert kept.exists()
    assert not kept.exists()


def test_order_that_is_none_is_refused_without_showing_it() -> None:
    line = json.dumps({"token": "a-secret", "proxy": "ws://h"}).encode() + b"\n"
    ended = subprocess.run([*SCRIPT], input=line, capture_output=True, check=False)
    assert ended.returncode == 2
    assert b"standard input: expected the order of a run, but name: Field required" in ended.stderr
    assert b"a-secret" not in ended.stderr + ended.stdout


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"relay": {}}, "engine.replicas=0: no engine"),
        ({"relay": {"workers": [{"gpus": 1}]}}, "workers.0: Ray reserves cpus, gpus and resources"),
        (
            {
                "cluster": {"backend": "ray"},
                "relay": {"workers": [{"command": ["ssh"], "resources": {"site": 1}}]},
            },
            "remove them, or relay.workers.0.command",
        ),
        (
            {"relay": {"workers": [{}]}, "proxy_server": {"host": "0.0.0.0"}},
            "relay.url: missing; workers cannot connect to proxy_server.host=0.0.0.0",
        ),
        (
            {
                "relay": {"workers": [{}]},
                "proxy_server": {"url": "http://127.0.0.1:1"},
                "engine": {"urls": ["http://127.0.0.1:2"]},
            },
            "relay.workers: the relay token of the proxy at proxy_server.url",
        ),
        ({"relay": {"workers": [{}], "url": "https://h"}}, "relay.url"),
    ],
)
def test_contradicting_settings_are_refused(
    tiny_model: Path, sections: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValidationError) as refused:
        config_of(tiny_model, **({"engine": ALONE} | sections))
    assert message in str(refused.value)


def test_plan_counts_the_workers(tiny_model: Path) -> None:
    workers = [{"command": ["ssh", "gpu-7"], "count": 2}, {}]
    relay = config_of(tiny_model, engine=ALONE, relay={"workers": workers}).relay
    assert relay.describe("local") == ["relay: 2 workers by ssh", "relay: 1 worker on this machine"]
    assert relay.describe("ray")[1] == "relay: 1 worker as actors of Ray"


def order_of(model: Path) -> WorkerOrder:
    token = SecretStr("a-secret-token")
    return WorkerOrder(proxy="ws://127.0.0.1:1", token=token, name="relay-0", model=model)


def _wait_for_line(log: Path) -> None:
    deadline = time.monotonic() + END_S
    while not (log.exists() and log.read_bytes()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
