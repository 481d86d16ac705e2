"""docker/nginx.conf as it is shipped, with TLS, in front of a proxy and of two that are gone."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import ssl
from pathlib import Path

import pytest

from proxy.client import ProxyClient
from proxy.machine.port import free_port
from tests.company_network import PrivateAuthority
from tests.deploy.manifests import ROOT
from tests.needs import needs
from tests.proxy.conftest import (  # noqa: F401
    ADMIN_KEY,
    StartProxy,
    checkpoint,
    rendering,
    start_proxy,
)

NGINX = shutil.which("nginx", path=os.environ["PATH"] + ":/usr/sbin")


def shipped(addresses: list[str], port: int, certificate: Path, folder: Path) -> str:
    """The file with TLS in place of plain HTTP, and addresses of this machine."""
    text = (ROOT / "docker/nginx.conf").read_text()
    for number, address in enumerate(addresses):
        text = text.replace(f"proxy-{number}:8000", address)
    text, plain = re.subn(r"^ *listen 8080;\n", "", text, flags=re.M)
    text, secured = re.subn(r"^( *)# ((?:listen|ssl_).*;)$", r"\1\2", text, flags=re.M)
    assert (plain, secured) == (1, 3)
    text = text.replace("listen 443", f"listen 127.0.0.1:{port}")
    text = re.sub(r"/etc/nginx/tls/\w+\.pem", str(certificate), text)
    paths = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    temporary = "".join(f"{name}_temp_path {folder}/{name};" for name in paths)
    user = "user root;" if os.geteuid() == 0 else ""
    text = text.replace("auto;", "1;").replace("http {", "http {" + temporary)
    return f"{user}pid {folder}/nginx.pid;\n{text}"


@needs(None if NGINX else "nginx is not installed: apt-get install nginx-light")
async def test_calls_pass_by_tls_while_other_proxies_are_gone(
    start_proxy: StartProxy,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert NGINX is not None
    authority, port = PrivateAuthority(tmp_path, "localhost"), free_port("127.0.0.1")
    trusting = ssl.create_default_context(cafile=str(authority.ca))
    monkeypatch.setattr("aiohttp.connector._SSL_CONTEXT_VERIFIED", trusting)
    url = f"https://localhost:{port}"
    proxy = await start_proxy(public_url=url)
    gone = [f"127.0.0.1:{free_port('127.0.0.1')}" for _ in range(2)]
    addresses = [*gone, proxy.url.removeprefix("http://")]
    config = tmp_path / "nginx.conf"
    config.write_text(shipped(addresses, port, authority.pem, tmp_path))
    balancer = await asyncio.create_subprocess_exec(
        *(NGINX, "-p", str(tmp_path), "-c", str(config), "-e", "stderr", "-g", "daemon off;"),
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        async with asyncio.timeout(120), ProxyClient(url, ADMIN_KEY) as client:
            while not await client.ready():  # nginx does not report that it listens
                assert balancer.returncode is None
                await asyncio.sleep(0.05)
            for number in range(6):  # whichever of the three the hash chooses first
                session = await client.create_session(f"team/s-{number}")
                assert session.base_url == f"{url}/team/s-{number}/v1"
                body = {"messages": [{"role": "user", "content": "Hi."}]}
                assert (await proxy.post(session, "chat/completions", body))[0] == 200
                await client.complete(session.trial_id)
            assert len(proxy.engine.calls) == 6
    finally:
        balancer.terminate()
        await balancer.wait()
