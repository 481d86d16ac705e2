"""The swarm server refuses clients without the token and pages of other sites."""

from __future__ import annotations

import asyncio
import socket
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from agent_loop.extras.swarm import cli
from agent_loop.extras.swarm.errors import SwarmError
from agent_loop.extras.swarm.token import (
    TOKEN_FILE_VARIABLE,
    TOKEN_VARIABLE,
    client_token,
    server_token,
    token_place,
)
from proxy.errors import ConfigurationError
from tests.agent_loop.extras.swarm.conftest import TOKEN, StartSwarm

AUTHORIZED = {"Authorization": f"Bearer {TOKEN}"}


def test_server_without_a_configured_token_makes_one_that_only_its_user_can_read(
    tmp_path: Path,
) -> None:
    made = server_token(tmp_path, {})
    assert len(made) > 30
    assert stat.S_IMODE((tmp_path / "token").stat().st_mode) == 0o600
    assert server_token(tmp_path, {}) == made
    assert server_token(tmp_path, {TOKEN_VARIABLE: "given"}) == "given"


def test_token_comes_from_the_file_that_the_variable_names(tmp_path: Path) -> None:
    file = tmp_path / "swarm-token"
    environment = {TOKEN_FILE_VARIABLE: str(file)}
    with pytest.raises(ConfigurationError, match=f"AGENTIC_SWARM_TOKEN_FILE: {file} cannot be"):
        server_token(tmp_path, environment)
    with pytest.raises(SwarmError, match=f"AGENTIC_SWARM_TOKEN_FILE: {file} cannot be read"):
        client_token("http://trainer:8100", tmp_path, environment)
    file.write_text("from-the-file\n")
    assert server_token(tmp_path, environment) == "from-the-file"
    assert client_token("http://trainer:8100", tmp_path, environment) == "from-the-file"
    assert not (tmp_path / "token").exists()
    assert token_place(tmp_path, environment) == str(file)
    assert server_token(tmp_path, environment | {TOKEN_VARIABLE: "given"}) == "given"


def test_clients_read_the_token_of_a_server_on_this_machine_alone(tmp_path: Path) -> None:
    made = server_token(tmp_path, {})
    assert client_token("http://127.0.0.1:8100", tmp_path, {}) == made
    assert client_token("http://localhost:8100/", tmp_path, {}) == made
    assert client_token("http://trainer:8100", tmp_path, {}) == ""
    assert client_token("http://127.0.0.1.evil.test", tmp_path, {}) == ""
    assert client_token("http://trainer:8100", tmp_path, {TOKEN_VARIABLE: "given"}) == "given"


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({"Host": "evil.test"}, 403),
        ({"Origin": "http://evil.test"}, 403),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Content-Type": "text/plain"}, 415),
    ],
)
@pytest.mark.parametrize("path", ["/v1/config", "/v1/stop", "/v1/episodes", "/trainer/hello"])
async def test_foreign_page_is_refused_even_with_the_token(
    start_swarm: StartSwarm, path: str, headers: dict[str, str], expected: int
) -> None:
    swarm = await start_swarm(rolling=False)
    sent = {"Content-Type": "application/json", **AUTHORIZED, **headers}
    method = "PUT" if path == "/v1/config" else "POST"
    async with swarm.http.request(method, swarm.url + path, data=b"{}", headers=sent) as response:
        assert response.status == expected
        assert set((await response.json())["error"]) == {"code", "message"}


@pytest.mark.parametrize("path", ["/v1/status", "/trainer/records/e", "/v1/episodes/e/outcome"])
async def test_token_that_is_not_utf_8_is_a_wrong_token(start_swarm: StartSwarm, path: str) -> None:
    swarm = await start_swarm(rolling=False)
    port = int(swarm.url.rpartition(":")[2])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nAuthorization: Bearer "
    writer.write(head.encode() + b"\xff\r\n\r\n")
    line = await reader.readline()
    writer.close()
    await writer.wait_closed()
    assert line.split()[1] == b"401"


@pytest.mark.parametrize("path", ["/v1/status", "/nothing"])
async def test_an_unknown_expect_header_gets_a_417_also_when_it_is_not_utf_8(
    start_swarm: StartSwarm, path: str
) -> None:
    swarm = await start_swarm(rolling=False)
    port = int(swarm.url.rpartition(":")[2])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nExpect: "
    writer.write(head.encode() + b"\xff\r\n\r\n")
    answer = await reader.read()
    writer.close()
    assert answer.split()[1] == b"417"


async def test_an_endless_event_number_is_ignored(start_swarm: StartSwarm) -> None:
    swarm = await start_swarm(rolling=False)
    headers = AUTHORIZED | {"Last-Event-ID": "9" * 5000}
    async with swarm.http.get(f"{swarm.url}/v1/events", headers=headers) as response:
        assert response.status == 200
        assert (await response.content.readline()).startswith(b"id: ")


async def test_unknown_route_is_named(start_swarm: StartSwarm) -> None:
    swarm = await start_swarm(rolling=False)
    async with swarm.http.get(f"{swarm.url}/v1/nothing", headers=AUTHORIZED) as response:
        assert response.status == 404
        assert "no route GET /v1/nothing" in (await response.json())["error"]["message"]


def test_status_of_a_server_that_does_not_answer_fails_without_waiting_for_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    attempts: list[object] = []

    def hang_up() -> None:
        try:
            while True:
                connection, address = listener.accept()
                attempts.append(address)
                connection.close()
        except OSError:
            return

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=hang_up)
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        code = cli.main(["status", url, "--state-dir", str(tmp_path)])
        listener.shutdown(socket.SHUT_RDWR)
    thread.join()
    assert code == 1
    assert len(attempts) <= 2  # aiohttp itself repeats a GET whose connection was closed
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{url} cannot be reached" in line
    assert "agentic-train --swarm-server" in line


def test_status_of_something_that_is_not_a_url_says_what_to_give(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["status", "127.0.0.1:8100"]) == 1
    assert "like http://127.0.0.1:8100" in capsys.readouterr().err


def test_help_imports_neither_torch_nor_aiohttp() -> None:
    program = """
import sys
from agent_loop.extras.swarm.cli import main
try:
    main(["--help"])
except SystemExit:
    pass
heavy = {"torch", "vllm", "aiohttp", "pydantic", "rich", "numpy"} & set(sys.modules)
sys.exit(f"imported: {sorted(heavy)}" if heavy else 0)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "watch" in done.stdout


@pytest.mark.parametrize(
    "url", ["127.0.0.1:8100", "http://", "http://[::1", "http://a:b", "ftp://a"]
)
def test_command_refuses_what_is_no_address_in_one_line(
    url: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["status", url]) == 1
    said = capfd.readouterr().err
    assert said.startswith(f"agentic-swarm: URL {url!r}: give the server's address, like http://")
    assert said.count("\n") == 1
