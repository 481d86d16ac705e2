"""A PostgreSQL server of Debian's package, in a temporary folder, on a Unix socket and a port.

It refuses to run as root, so as root it runs as the package's user `postgres`.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

import asyncpg


def binaries() -> Path | None:
    """The newest installed version's programs."""
    versions = Path("/usr/lib/postgresql").glob("*/bin/initdb")
    newest = max(versions, key=lambda path: float(path.parts[-3]), default=None)
    return newest.parent if newest else None


@contextmanager
def postgres_server(programs: Path) -> Iterator[str]:
    """Yields the URL of a database server that trusts everybody on loopback."""
    folder = Path(tempfile.mkdtemp(prefix="postgres-"))
    data = folder / "data"
    try:
        if os.geteuid() == 0:
            shutil.chown(folder, "postgres", "postgres")
        _run(programs / "initdb", "-D", data, "-A", "trust", "-U", "proxy", "--no-sync")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        options = f"-p {port} -c listen_addresses=127.0.0.1 -c unix_socket_directories={folder}"
        server = [programs / "pg_ctl", "-D", data, "-l", folder / "log"]
        _run(*server, "-w", "-o", options, "start")
        try:
            yield f"postgresql://proxy@127.0.0.1:{port}/postgres"
        finally:
            _run(*server, "-w", "-m", "immediate", "stop")
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
    as_user = ["setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups"]
    command = [*(as_user if os.geteuid() == 0 else []), *map(str, argv)]
    silent = subprocess.DEVNULL
    done = subprocess.run(command, cwd="/", stdin=silent, stdout=silent, stderr=subprocess.PIPE)
    if done.returncode != 0:
        raise RuntimeError(f"{command[-1]}: {done.stderr.decode()}")
