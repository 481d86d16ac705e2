"""Brings `docker/compose.yaml` up as processes of this machine, without a container engine.

As with Docker, each service has a network namespace, in which the services' names are known, and is
isolated (`isolation.py`) with its own volumes, secrets, user and file systems in memory. A service
starts when those that it depends on are healthy, and again whenever it ends. A published port is
one of this machine. Only the fields of `FIELDS` are understood; a file with others is refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shlex
import signal
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import yaml

from tests.deploy.isolation import PATH, Isolation, Mount
from tests.deploy.manifests import (
    ROOT,
    SECRETS,
    Resource,
    entrypoint,
    filled,
    image_health_check,
    image_user,
    image_variables,
)
from tests.namespaces import machines, processes

COMPOSE = ROOT / "docker/compose.yaml"
FIELDS = frozenset(
    [
        "build",
        "image",
        "command",
        "environment",
        "ports",
        "volumes",
        "depends_on",
        "secrets",
        "stop_grace_period",
        "user",
        "tmpfs",
        "healthcheck",
        "shm_size",
        "deploy",
        "read_only",
        "cap_drop",
        "security_opt",
        "restart",
    ]
)
Forward = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
START_INTERVAL_S = 0.2
"""Of health checks in `start_period`; Docker's is 5."""
RESTART_DELAY_S = 0.1
"""Docker's first delay, which it doubles."""


@dataclass(frozen=True)
class Image:
    """What there is in place of an image: programs of this machine."""

    entrypoint: tuple[str, ...]
    user: int
    variables: Mapping[str, str]
    health: Resource
    passwd: str = ""
    """Lines of its `/etc/passwd`."""
    stop: signal.Signals = signal.SIGTERM

    @classmethod
    def of(cls, dockerfile: Path) -> Image:
        user = image_user(dockerfile)
        return cls(
            tuple(entrypoint(dockerfile)),
            user,
            image_variables(dockerfile) | {"PATH": PATH},
            image_health_check(dockerfile),
            f"agentic:x:{user}:{user}::/nonexistent:/usr/sbin/nologin\n",
        )


class Service:
    def __init__(
        self, name: str, spec: Resource, machine: str, image: Image, mounts: list[Mount], log: Path
    ) -> None:
        assert not spec.keys() - FIELDS, f"{name}: {spec.keys() - FIELDS}"
        assert spec["read_only"] is True
        assert spec["cap_drop"] == ["ALL"]
        assert spec["security_opt"] == ["no-new-privileges:true"]
        assert spec["restart"] == "unless-stopped"
        self.name, self.spec, self.machine, self.log = name, spec, machine, log
        self.started = 0
        """How often its program was started."""
        self.process: asyncio.subprocess.Process | None = None
        self._image = image
        self._isolation = Isolation(
            machine,
            log.with_suffix(".root"),
            int(str(spec.get("user", image.user)).partition(":")[0]),
            mounts,
            {**image.variables, **spec.get("environment", {})},
        )
        self._check: Resource = {**image.health, **spec.get("healthcheck", {})}

    async def run(self) -> None:
        """Starts the program, again whenever it ends."""
        words = [*self._image.entrypoint, *map(str, self.spec.get("command", ()))]
        command = self._isolation.command(words)
        delay_s = RESTART_DELAY_S
        while True:
            with self.log.open("ab") as log:
                self.process = await asyncio.create_subprocess_exec(
                    *command,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            self.started += 1
            await self.process.wait()
            await asyncio.sleep(delay_s)
            delay_s *= 2

    async def healthy(self) -> None:
        """Returns when the health check succeeds.

        Raises:
            AssertionError: it has failed `retries` times after `start_period`.
        """
        assert self._check["test"][0] == "CMD"
        interval_s, failures = seconds(self._check["interval"]), 0
        clock = asyncio.get_running_loop().time
        starts_until = clock() + seconds(self._check.get("start_period", "0s"))
        while failures < self._check.get("retries", 3):
            starting = clock() < starts_until
            await asyncio.sleep(min(interval_s, START_INTERVAL_S) if starting else interval_s)
            if await self._succeeds():
                return
            failures += clock() >= starts_until
        raise AssertionError(f"{self.name} is unhealthy\n{self.log.read_text()[-4000:]}")

    async def _succeeds(self) -> bool:
        assert self.process is not None
        command = self._isolation.inside(self.process.pid, self._check["test"][1:])
        check = await asyncio.create_subprocess_exec(
            *command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            async with asyncio.timeout(seconds(self._check["timeout"])):
                return await check.wait() == 0
        except TimeoutError:
            check.kill()
            await check.wait()
            return False

    async def stop(self) -> int:
        """Returns the program's exit status. Raises TimeoutError after `stop_grace_period`."""
        assert self.process is not None
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(self._image.stop)
        async with asyncio.timeout(seconds(self.spec["stop_grace_period"])):
            return await self.process.wait()

    def kill(self) -> None:
        """`kill -9` of every process of the service."""
        for process in processes(self.machine):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)


class Project:
    def __init__(self, services: Mapping[str, Service], addresses: Mapping[str, str]) -> None:
        """`services` in the order in which they start."""
        self.services, self.addresses = services, addresses
        self._runs: dict[str, asyncio.Task[None]] = {}
        self._published: list[asyncio.Server] = []

    async def up(self) -> None:
        """Returns when each service is healthy, as `docker compose up --wait` does."""
        for name, service in self.services.items():
            self._runs[name] = asyncio.create_task(service.run())
            await service.healthy()
            for port in service.spec.get("ports", ()):
                here, there = map(int, port.split(":"))
                forward = await asyncio.start_server(self._forward(name, there), "127.0.0.1", here)
                self._published.append(forward)

    async def down(self) -> dict[str, int]:
        """Ends the services, the last started first. Returns their exit statuses."""
        self._unpublish()
        statuses = {}
        for name in reversed([*self._runs]):
            self._runs.pop(name).cancel()
            statuses[name] = await self.services[name].stop()
        return statuses

    def kill(self) -> None:
        self._unpublish()
        for run in self._runs.values():
            run.cancel()
        for service in self.services.values():
            service.kill()

    def _unpublish(self) -> None:
        while self._published:
            self._published.pop().close()

    def _forward(self, name: str, port: int) -> Forward:
        async def forward(client: asyncio.StreamReader, answers: asyncio.StreamWriter) -> None:
            try:
                server, requests = await asyncio.open_connection(self.addresses[name], port)
            except OSError:
                answers.close()
                return
            await asyncio.gather(copied(client, requests), copied(server, answers))

        return forward


async def copied(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await source.read(65_536):
            target.write(data)
            await target.drain()
    target.close()


@asynccontextmanager
async def composed(
    variables: Mapping[str, str], images: Mapping[str, Image], folder: Path
) -> AsyncIterator[Project]:
    """The project, not yet up. `images` has those that are not built from a Dockerfile of ours, by
    name without tag. What still runs at the end is killed.

    Raises:
        ValueError: a variable that the file needs is missing.
    """
    file = yaml.safe_load(filled(text_of(COMPOSE), variables))
    names = ordered(file["services"])
    with machines(len(names)) as made:
        addresses = {name: address for name, (_, address) in zip(names, made, strict=True)}
        hosts = folder / "hosts"
        known = {"localhost": "127.0.0.1", **addresses}
        hosts.write_text("".join(f"{address} {name}\n" for name, address in known.items()))
        services = {}
        for name, (machine, _) in zip(names, made, strict=True):
            spec = file["services"][name]
            image = image_of(spec, images)
            passwd = folder / f"{name}.passwd"
            passwd.write_text("root:x:0:0:root:/root:/bin/sh\n" + image.passwd)
            mounts = [Mount("/etc/hosts", hosts, True), Mount("/etc/passwd", passwd, True)]
            mounts += mounted(spec, file, image, folder)
            log = folder / f"{name}.log"
            services[name] = Service(name, spec, machine, image, mounts, log)
        project = Project(services, addresses)
        try:
            yield project
        finally:
            project.kill()


def text_of(path: Path) -> str:
    """The file without comments, whose examples are not filled."""
    return re.sub(r"^\s*#.*\n", "", path.read_text(), flags=re.MULTILINE)


def ordered(services: Mapping[str, Resource]) -> list[str]:
    """Names of the services, each after those that it depends on."""
    found: list[str] = []

    def add(name: str) -> None:
        for needed, how in services[name].get("depends_on", {}).items():
            assert how == {"condition": "service_healthy"}
            add(needed)
        if name not in found:
            found.append(name)

    for name in services:
        add(name)
    return found


def image_of(spec: Resource, images: Mapping[str, Image]) -> Image:
    if "build" in spec:
        return Image.of(COMPOSE.parent / spec["build"]["context"] / spec["build"]["dockerfile"])
    return images[spec["image"].rpartition(":")[0]]


def mounted(spec: Resource, file: Resource, image: Image, folder: Path) -> list[Mount]:
    """Named volumes are folders, which belong to the image's user as in the image."""
    memory = "nosuid,nodev,mode=1777"
    mounts = [Mount("/dev/shm", options=f"{memory},size={spec.get('shm_size', '64m')}")]
    for each in spec["tmpfs"]:
        path, _, options = each.partition(":")
        mounts.append(Mount(path, options=",".join(filter(None, ["noexec", memory, options]))))
    for each in spec.get("volumes", ()):
        source, path, *options = each.split(":")
        assert options in ([], ["ro"])
        if source in file["volumes"]:
            made = folder / "volumes" / source
            made.mkdir(parents=True, exist_ok=True)
            os.chown(made, image.user, image.user)
            source = str(made)
        mounts.append(Mount(path, Path(source), read_only=bool(options)))
    secrets = {name: Path(file["secrets"][name]["file"]) for name in spec.get("secrets", ())}
    return [*mounts, *(Mount(f"{SECRETS}/{name}", path, True) for name, path in secrets.items())]


def seconds(text: str) -> float:
    assert text.endswith("s"), text
    return float(text.removesuffix("s"))


def postgres_image(programs: Path) -> Image:
    """In place of the official image: its entry point's first start and its user."""
    start = """
export PGDATA=/var/lib/postgresql/data
if [ ! -s $PGDATA/PG_VERSION ]; then
    initdb --username=$POSTGRES_USER --pwfile=$POSTGRES_PASSWORD_FILE --auth-host=scram-sha-256 \\
        --auth-local=trust --no-sync
    echo 'host all all all scram-sha-256' >> $PGDATA/pg_hba.conf
    pg_ctl -w -o '-c listen_addresses=' start
    if [ $POSTGRES_DB != postgres ]; then createdb -U $POSTGRES_USER $POSTGRES_DB; fi
    pg_ctl -w -m fast stop
fi
exec postgres -c 'listen_addresses=*'
"""
    return Image(
        entrypoint=("sh", "-ec", start),
        user=999,
        variables={"PATH": f"{shlex.quote(str(programs))}:{PATH}", "LC_ALL": "C.UTF-8"},
        health={},
        passwd="postgres:x:999:999::/var/lib/postgresql:/bin/bash\n",
        stop=signal.SIGINT,
    )
