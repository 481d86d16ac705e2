"""What a company's network has: an HTTP proxy as the only way out, and a certificate authority."""

from __future__ import annotations

import asyncio
import ssl
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from aiohttp import web

HOSTED = "model.hosted.example"
"""A host of the internet, which no name server knows: only the proxy can reach it."""
PROXY_NAMES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy")
DEAD = "http://127.0.0.1:9"
"""The discard port, at which nothing listens here."""


class CompanyProxy:
    """An HTTP proxy that connects everything to one server (`company_proxy`)."""

    def __init__(self, to_port: int) -> None:
        self.heads: list[bytes] = []
        """The head of each request that it received."""
        self.status = b"200 Connection established"
        self.url = ""
        self._to_port = to_port
        self._serving: set[asyncio.Task[None] | None] = set()
        self._writers: list[asyncio.StreamWriter] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._serving.add(asyncio.current_task())
        self._writers.append(writer)
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            self.heads.append(await reader.readuntil(b"\r\n\r\n"))
            writer.write(b"HTTP/1.1 " + self.status + b"\r\n\r\n")
            if self.status.startswith(b"200"):
                there, back = await asyncio.open_connection("127.0.0.1", self._to_port)
                self._writers.append(back)
                await asyncio.gather(_copy(reader, back), _copy(there, writer))
        writer.close()

    async def end(self) -> None:
        """Closes all connections, also those whose ends are still open."""
        tasks = [task for task in self._serving if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for writer in self._writers:
            writer.transport.abort()
        for writer in self._writers:
            with suppress(ConnectionError):
                await writer.wait_closed()


@asynccontextmanager
async def company_proxy(to_port: int) -> AsyncIterator[CompanyProxy]:
    proxy = CompanyProxy(to_port)
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
    proxy.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server:
        try:
            yield proxy
        finally:
            await proxy.end()


class PrivateAuthority:
    """A certificate authority that no public list has: `ca` is its certificate, `pem` that of the
    host, with its key."""

    def __init__(self, folder: Path, host: str = HOSTED) -> None:
        self.ca, key = folder / "company-ca.pem", folder / "company-ca.key"
        self.pem, request = folder / "server.pem", folder / "server.csr"
        extension = folder / "server.ext"
        extension.write_text(f"subjectAltName=DNS:{host}\n")
        new = ("-newkey", "rsa:2048", "-nodes", "-subj")
        _openssl("req", "-x509", *new, "/CN=Company CA", "-keyout", key, "-out", self.ca)
        _openssl("req", *new, f"/CN={host}", "-keyout", self.pem, "-out", request)
        signing = ("-CA", self.ca, "-CAkey", key, "-CAcreateserial", "-extfile", extension)
        signed = _openssl("x509", "-req", "-in", request, *signing)
        self.pem.write_text(self.pem.read_text() + signed)

    @asynccontextmanager
    async def serving(self, app: web.Application) -> AsyncIterator[int]:
        """Serves the application by TLS on loopback; yields its port."""
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(self.pem)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context).start()
        try:
            yield runner.addresses[0][1]
        finally:
            await runner.cleanup()


def _openssl(*arguments: str | Path) -> str:
    done = subprocess.run(["openssl", *arguments], check=True, capture_output=True, text=True)
    return done.stdout


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(ConnectionError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    writer.close()
