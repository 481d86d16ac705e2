"""The built images, run as their users in read-only root file systems (`make images`).

Without a container engine: the image's tree, mounted by buildah, is the root of a mount namespace
in which nothing but the declared volume and /tmp can be written, and the process has no capability.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import pytest

from proxy import __version__
from proxy.client import ProxyClient
from proxy.testing.scripted_engine import ScriptedEngine
from tests.proxy.checkpoint import write_checkpoint

KEY = "an-admin-key-of-the-tests"
BUILT = os.environ.get("IMAGES", "").split()
PROXY_IMAGE_BYTES = 340 * 10**6


def buildah(*arguments: str) -> str:
    return subprocess.run(
        ["buildah", *arguments], check=True, capture_output=True, text=True
    ).stdout.strip()


@dataclass
class Image:
    root: Path
    config: dict[str, Any]

    @asynccontextmanager
    async def run(
        self, *arguments: str, binds: dict[str, Path], **variables: str
    ) -> AsyncIterator[asyncio.subprocess.Process]:
        command = [*self.config["Entrypoint"], *(arguments or self.config.get("Cmd") or ())]
        process = await asyncio.create_subprocess_exec(
            *self._isolated(command, binds, variables), stdout=subprocess.PIPE, stderr=None
        )
        try:
            yield process
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()

    def call(self, command: Sequence[str], binds: dict[str, Path] | None = None) -> int:
        """Runs another command in the image and returns its exit status."""
        isolated = self._isolated(command, binds or {}, {})
        return subprocess.run(isolated, capture_output=True, check=False).returncode

    def _isolated(
        self, command: Sequence[str], binds: dict[str, Path], variables: dict[str, str]
    ) -> list[str]:
        root, user = shlex.quote(str(self.root)), self.config["User"]
        steps = [f"mount --bind {root} {root}", f"mount -o remount,bind,ro {root}"]
        steps += [f"mount -t tmpfs tmpfs {root}/tmp", f"mount -t proc proc {root}/proc"]
        steps += [f"mount --rbind /dev {root}/dev"]
        for target, source in binds.items():
            (self.root / target.lstrip("/")).mkdir(exist_ok=True)
            steps.append(f"mount --bind {shlex.quote(str(source))} {root}{target}")
        environment = [*self.config["Env"], *(f"{k}={v}" for k, v in variables.items())]
        drop = f"setpriv --reuid {user} --regid {user} --clear-groups --bounding-set=-all"
        inner = f"cd {self.config['WorkingDir']}; exec {drop} --no-new-privs {shlex.join(command)}"
        enter = ["chroot", str(self.root), "/usr/bin/env", "-i", *environment, "sh", "-c", inner]
        return ["unshare", "--mount", "sh", "-ec", "; ".join([*steps, f"exec {shlex.join(enter)}"])]


def open_image(name: str) -> Iterator[Image]:
    if name not in BUILT:
        pytest.skip(f"the image {name} is not built: run make images IMAGES={name}")
    container = buildah("from", f"localhost/agentic-{name}:{__version__}")
    try:
        described = orjson.loads(buildah("inspect", container))
        yield Image(Path(buildah("mount", container)), described["Docker"]["config"])
    finally:
        buildah("rm", container)


@pytest.fixture
def proxy_image() -> Iterator[Image]:
    yield from open_image("proxy")


@pytest.fixture
def harbor_image() -> Iterator[Image]:
    yield from open_image("harbor")


@pytest.fixture
def trainer_image() -> Iterator[Image]:
    yield from open_image("trainer")


def writable(folder: Path, image: Image) -> Path:
    folder.mkdir()
    os.chown(folder, int(image.config["User"]), int(image.config["User"]))
    return folder


async def line_with(process: asyncio.subprocess.Process, words: str) -> str:
    assert process.stdout is not None
    async with asyncio.timeout(180):
        while words not in (line := (await process.stdout.readline()).decode()):
            assert line, f"it ended without saying {words!r}"
    return line


async def test_proxy_serves_in_its_image(proxy_image: Image, tmp_path: Path) -> None:
    binds = {
        "/data": writable(tmp_path / "data", proxy_image),
        "/model": write_checkpoint(tmp_path / "model"),
    }
    tmp_path.chmod(0o755)
    async with (
        ScriptedEngine(lambda _: [7, 2]) as engine,
        proxy_image.run(
            binds=binds,
            AGENTIC_PROXY_ADMIN_KEY=KEY,
            AGENTIC_PROXY_ENGINES=f'[{{"url": "{engine.url}"}}]',
        ) as process,
        ProxyClient("http://127.0.0.1:8000", KEY) as proxy,
    ):
        await line_with(process, "recording proxy on http://0.0.0.0:8000")
        check = proxy_image.config["Healthcheck"]["Test"][1:]
        assert await asyncio.to_thread(proxy_image.call, check) == 0
        assert await proxy.ready()
        session = await proxy.create_session("t-1")
        assert session.trial_id == "t-1"
        assert (tmp_path / "data/proxy.db").exists()
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0
    assert await asyncio.to_thread(proxy_image.call, check) != 0


def test_proxy_image_is_small_and_has_no_torch(proxy_image: Image) -> None:
    (described,) = orjson.loads(
        buildah("images", "--json", f"localhost/agentic-proxy:{__version__}")
    )
    used = subprocess.run(
        ["du", "-s", "--block-size=1", str(proxy_image.root)],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    print(f"{described['size']}, {int(used.split()[0]) / 1e6:.0f} MB on disk")
    assert float(described["size"].split()[0]) * 10**6 < PROXY_IMAGE_BYTES
    assert proxy_image.call(["python3", "-c", "import torch"]) != 0


@pytest.mark.parametrize("path", ["/opt/agentic/x", "/etc/x", "/x"])
def test_only_the_volume_is_writable(proxy_image: Image, path: str) -> None:
    assert proxy_image.call(["sh", "-c", "echo > /tmp/x"]) == 0
    assert proxy_image.call(["sh", "-c", f"echo > {path}"]) != 0


def test_worker_is_in_proxy_image(proxy_image: Image) -> None:
    assert proxy_image.call(["python3", "-m", "proxy.extras.relay", "--help"]) == 0
    assert proxy_image.call(["python3", "-c", "import gcsfs, s3fs"]) == 0


async def test_harbor_server_serves_in_its_image(harbor_image: Image, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    async with harbor_image.run(
        binds={"/data": writable(tmp_path / "data", harbor_image)},
        HARBOR_SERVER_TOKEN="a-token-of-the-tests",
    ) as process:
        await line_with(process, "harbor-server on http://0.0.0.0:8090")
        check = harbor_image.config["Healthcheck"]["Test"][1:]
        assert await asyncio.to_thread(harbor_image.call, check) == 0
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0


def test_trainer_starts_in_its_image(trainer_image: Image, tmp_path: Path) -> None:
    code = "import torch, vllm, trainer.cli, pathlib; print(torch.__version__)"
    code += "; assert all(pathlib.Path(m.__cached__).exists() for m in (torch, vllm, trainer.cli))"
    assert trainer_image.call(["python3", "-c", code]) == 0
    assert trainer_image.call(["agentic-train", "--help"]) == 0
    assert trainer_image.call(["agentic-train", "--config", "/none.yaml"]) == 2
