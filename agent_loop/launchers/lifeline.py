"""A connection for each agent on another machine; it is open as long as the agent can live.

    expected ──▶ connected ──▶ ending (our side is closed) ──▶ ended (their side is closed)
       └─▶ ended (withdrawn: no agent can start any more)

The node connects before it starts the agent, and hands the connection to the agent's supervisor
(`processes/supervisor.py`). Invariants: an agent runs only while its lifeline is connected; and
when the node's kernel closes the connection, every process that held it has ended, and so has the
agent with its descendants. Neither depends on the cluster's own bookkeeping, nor on a worker
process that may be suspended or killed. If the launcher's process dies or the network is cut, the
supervisor's side closes, and it ends the agent.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
from dataclasses import dataclass

from agent_loop.errors import LaunchError
from proxy.machine.port import host_and_port

TOKEN_BYTES = 32
GREETING_TIMEOUT_S = 60.0
"""Seconds for a connection and its greeting, in both directions; a busy machine may need some."""
WELCOME = b"1"
PROBES = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 6}
"""A peer that does not answer for 90 s is lost: long enough for a route that changes."""


@dataclass(frozen=True, slots=True)
class LifelineAddress:
    """Where a node connects. Example: LifelineAddress("10.0.0.5", 40123, b"…")"""

    host: str
    port: int
    token: bytes
    """TOKEN_BYTES random bytes, for one connection."""

    def connect(self) -> socket.socket:
        """Called on the node, before its agent starts.

        Raises:
            LaunchError: the launcher cannot be reached, or does not wait for this agent any more.
        """
        where = host_and_port(self.host, self.port)
        try:
            line = socket.create_connection((self.host, self.port), timeout=GREETING_TIMEOUT_S)
        except OSError as error:
            raise LaunchError(
                f"node {socket.gethostname()} cannot connect to the launcher at {where}: {error}; "
                "nodes must reach this port, as they reach Ray's own"
            ) from error
        try:
            line.sendall(self.token)
            welcome = line.recv(1)
        except OSError:
            welcome = b""
        if welcome != WELCOME:
            line.close()
            raise LaunchError(f"the launcher at {where} does not wait for this agent any more")
        line.settimeout(None)
        _probe(line)
        return line


class Lifeline:
    """The launcher's side of one agent's connection."""

    def __init__(self, listener: LifelineListener, address: LifelineAddress) -> None:
        self.address = address
        self.connected: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """The node's IP address, once it has connected."""
        self._listener = listener
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def end(self, limit_s: float) -> bool:
        """Ends the agent, and waits until it has ended, at most `limit_s`, also if this call is
        cancelled. Returns False if the agent may still run. Called once."""
        self._listener.withdraw(self.address.token)
        if self._streams is None:
            return True
        ending = asyncio.create_task(self._end(*self._streams, limit_s))
        while not ending.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([ending])
        return ending.result()

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """The node has connected: its agent may start."""
        self._streams = reader, writer
        _probe(writer.get_extra_info("socket"))
        writer.write(WELCOME)
        if not self.connected.done():  # it is done if the caller was cancelled
            self.connected.set_result(writer.get_extra_info("peername")[0])

    async def _end(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, limit_s: float
    ) -> bool:
        try:
            async with asyncio.timeout(limit_s):
                with contextlib.suppress(OSError):  # the connection was reset
                    if writer.can_write_eof():
                        writer.write_eof()
                    await reader.read()
        except TimeoutError:
            return False
        finally:
            writer.close()
        return True


class LifelineListener:
    """Accepts the connections of expected agents, and closes all others."""

    def __init__(self) -> None:
        self._server: asyncio.Server | None = None
        self._starting = asyncio.Lock()
        self._expected: dict[bytes, Lifeline] = {}

    async def expect(self, host: str) -> Lifeline:
        """`host`: this machine's IP address as nodes see it; the first call listens on it.

        Raises:
            LaunchError: this address is not one of this machine's.
        """
        async with self._starting:
            if self._server is None:
                try:
                    self._server = await asyncio.start_server(self._arrived, host, 0)
                except OSError as error:
                    raise LaunchError(f"cannot listen on {host} for agents: {error}") from error
        port: int = self._server.sockets[0].getsockname()[1]
        address = LifelineAddress(host, port, secrets.token_bytes(TOKEN_BYTES))
        line = self._expected[address.token] = Lifeline(self, address)
        return line

    def withdraw(self, token: bytes) -> None:
        """Expects this agent no more."""
        self._expected.pop(token, None)

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None

    async def _arrived(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        token = b""
        with contextlib.suppress(TimeoutError, OSError, asyncio.IncompleteReadError):
            async with asyncio.timeout(GREETING_TIMEOUT_S):
                token = await reader.readexactly(TOKEN_BYTES)
        line = self._expected.pop(token, None)
        if line is None:
            writer.close()
        else:
            line.accept(reader, writer)


def _probe(line: socket.socket) -> None:
    line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in PROBES.items():
        line.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
