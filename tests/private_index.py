"""A company's package index and registry: with a password, by TLS of the company's own authority.

It has what the public index has, as Artifactory and devpi do, and rewrites the addresses of files.
"""

from __future__ import annotations

import base64
import json
import os
import re
import ssl
import tarfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urljoin, urlsplit

import httpx

from tests.company_network import DEAD, PROXY_NAMES, PrivateAuthority

USER = "me:a secret"
LINK = re.compile(r'href="([^"]+)"')
UPSTREAM = os.environ.get("UV_DEFAULT_INDEX", os.environ.get("PIP_INDEX_URL", ""))
PUBLIC = (UPSTREAM or "https://pypi.org/simple").rstrip("/") + "/"


class PrivateIndex:
    """`url` holds the password; `environment`: what a machine has that reaches nothing else."""

    def __init__(self, server: ThreadingHTTPServer, authority: Path) -> None:
        self.files: list[str] = []
        """The wheels that were fetched, by name."""
        self.authority = authority
        self.host = f"localhost:{server.server_port}"
        self.url = f"https://{USER.replace(' ', '%20')}@{self.host}/simple"
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("PIP_", "UV_", "npm_config"))
            and name not in ("PYTHONPATH", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "SSL_CERT_DIR")
        }
        reach = {**dict.fromkeys(PROXY_NAMES, DEAD), "NO_PROXY": "localhost"}
        self.environment = {**kept, **reach, "SSL_CERT_FILE": str(authority)}
        self.environment |= {"no_proxy": "localhost", "PIP_CONFIG_FILE": os.devnull}


@contextmanager
def private_index(folder: Path) -> Iterator[PrivateIndex]:
    authority = PrivateAuthority(folder, "localhost")
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(authority.pem)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    with httpx.Client(follow_redirects=True, timeout=60) as client:
        _Handler.client, _Handler.index = client, PrivateIndex(server, authority.ca)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield _Handler.index
        finally:
            server.shutdown()
            thread.join()
            server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    client: httpx.Client
    index: PrivateIndex

    def do_GET(self) -> None:
        expected = f"Basic {base64.b64encode(USER.encode()).decode()}"
        if self.headers.get("Authorization") != expected:
            self._send(401, b"", {"WWW-Authenticate": 'Basic realm="company"'})
        elif self.path.startswith("/simple/"):
            self._page(urljoin(PUBLIC, self.path.removeprefix("/simple/")))
        else:
            self._file("https://" + self.path.removeprefix("/files/"))

    do_HEAD = do_GET  # noqa: N815

    def _page(self, url: str) -> None:
        answer = self.client.get(url, headers={"Accept": "text/html"})
        page = LINK.sub(lambda link: f'href="{_here(urljoin(url, link[1]))}"', answer.text)
        self._send(answer.status_code, page.encode(), {"Content-Type": "text/html"})

    def _file(self, url: str) -> None:
        wanted = {"Range": self.headers["Range"]} if "Range" in self.headers else {}
        answer = self.client.get(url, headers=wanted)
        self.index.files.append(url.rpartition("/")[2])
        ranges = {"Content-Range": answer.headers.get("Content-Range", "")}
        self._send(answer.status_code, answer.content, ranges if ranges["Content-Range"] else {})

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Nothing."""


def _here(url: str) -> str:
    """The file's address at this index."""
    parts = urlsplit(url)
    return f"/files/{parts.netloc}{parts.path}" + (f"#{parts.fragment}" if parts.fragment else "")


@contextmanager
def private_registry(folder: Path) -> Iterator[str]:
    """A registry for npm with one package, `tool` 1.0.0; yields its URL."""
    (folder / "package").mkdir()
    described = {"name": "tool", "version": "1.0.0"}
    (folder / "package/package.json").write_text(json.dumps(described))
    with tarfile.open(folder / "tool.tgz", "w:gz") as archive:
        archive.add(folder / "package", "package")
    served = folder / "served"
    served.mkdir()
    (folder / "tool.tgz").rename(served / "tool.tgz")
    handler = partial(SimpleHTTPRequestHandler, directory=str(served))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        url = f"http://127.0.0.1:{server.server_port}"
        version = described | {"dist": {"tarball": f"{url}/tool.tgz"}}
        (served / "tool").write_text(
            json.dumps(
                {"name": "tool", "dist-tags": {"latest": "1.0.0"}, "versions": {"1.0.0": version}}
            )
        )
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield url
        finally:
            server.shutdown()
            thread.join()
