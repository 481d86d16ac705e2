"""A PostgreSQL server of Debian's package, in a temporary folder, on a Unix socket and a port.

It refuses to run as root, so as root it runs as the package's user `postgres`.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import asyncpg


def binaries() -> Path | None:
    """The newest installed version's programs."""
    versions = Path("/usr/lib/postgresql").glob("*/bin/initdb")
    newest = max(versions, key=lambda path: float(path.parts[-3]), default=None)
    return newest.parent if newest else None


@dataclass(slots=True)
class PostgresServer:
    """A server as our own child, that can be killed and started again."""

    url: str
    programs: Path
    folder: Path
    port: int
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Returns when it accepts connections."""
        options = ["-p", str(self.port), "-c", "listen_addresses=127.0.0.1"]
        # Killed processes lose nothing without fsync, only a machine without power would.
        options += ["-c", f"unix_socket_directories={self.folder}", "-c", "fsync=off"]
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                _as_user(self.programs / "postgres", "-D", self.folder / "data", *options),
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        ready = [str(self.programs / "pg_isready"), "-q", "-h", "127.0.0.1", "-p", str(self.port)]
        while subprocess.run(ready, check=False).returncode != 0:
            if self.process.poll() is not None:
                raise RuntimeError(f"postgres ended: {(self.folder / 'log').read_text()[-2000:]}")
            time.sleep(0.05)

    def kill(self) -> None:
        """`kill -9` of every process of the server, as at a crash of its machine."""
        assert self.process is not None
        pid = self.process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        pidfds = [os.pidfd_open(int(child)) for child in children]
        self.process.kill()
        self.process.wait()
        for pidfd in pidfds:  # the next start refuses while one of them lives
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            select.select([pidfd], [], [])
            os.close(pidfd)

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGQUIT)  # "immediate"
            self.process.wait()


@contextmanager
def postgres_server(programs: Path) -> Iterator[str]:
    """Yields the URL of a database server that trusts everybody on loopback."""
    with postgres_process(programs) as server:
        yield server.url


@contextmanager
def postgres_process(programs: Path) -> Iterator[PostgresServer]:
    folder = Path(tempfile.mkdtemp(prefix="postgres-"))
    try:
        if os.geteuid() == 0:
            shutil.chown(folder, "postgres", "postgres")
        _run(programs / "initdb", "-D", folder / "data", "-A", "trust", "-U", "proxy", "--no-sync")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        url = f"postgresql://proxy@127.0.0.1:{port}/postgres"
        server = PostgresServer(url, programs, folder, port)
        server.start()
        try:
            yield server
        finally:
            server.stop()
    finally:
        shutil.rmtree(folder)


async def empty_database(server: str) -> str:
    """URL of a new database on the server."""
    name = f"test_{uuid4().hex}"
    connection = await asyncpg.connect(server)
    await connection.execute(f"CREATE DATABASE {name}")
    await connection.close()
    return server.rpartition("/")[0] + f"/{name}"


def _run(*argv: str | Path) -> None:
    command, silent = _as_user(*argv), subprocess.DEVNULL
    done = subprocess.run(command, cwd="/", stdin=silent, stdout=silent, stderr=subprocess.PIPE)
    if done.returncode != 0:
        raise RuntimeError(f"{command[-1]}: {done.stderr.decode()}")


def _as_user(*argv: str | Path) -> list[str]:
    as_user = ["setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups"]
    return [*(as_user if os.geteuid() == 0 else []), *map(str, argv)]
