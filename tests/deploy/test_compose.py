"""`docker/compose.yaml`, brought up as processes (`compose.py`) by what docs/deployment.md says."""

from __future__ import annotations

import re
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from proxy.client import ProxyClient, SessionHandle
from proxy.machine.port import free_port
from proxy.records import Turn, TurnStatus
from tests.deploy.compose import COMPOSE, Image, Project, composed, postgres_image, text_of
from tests.deploy.isolation import PATH, skip_without_mounts
from tests.deploy.manifests import ROOT, filled
from tests.namespaces import ip, processes
from tests.needs import skip_or_fail
from tests.postgres_server import binaries

KEY = "an-admin-key-of-the-tests"
VLLM = "docker.io/vllm/vllm-openai"
ANSWER = [5, 2]
SCRIPTED = f"""
from aiohttp import web
from proxy.testing.scripted_engine import ScriptedEngine
web.run_app(ScriptedEngine(lambda _: {ANSWER}).build_app(), host="0.0.0.0", port=8001, print=None)
"""
SCRIPTED_ENGINE = Image(
    ("python3", "-c", SCRIPTED), 0, {"PATH": PATH, "PYTHONPATH": str(ROOT)}, health={}
)


@asynccontextmanager
async def project(
    model: Path, folder: Path, engine: Image = SCRIPTED_ENGINE
) -> AsyncIterator[tuple[Project, ProxyClient]]:
    """The project with what its user gives it, and a client of the published port."""
    skip_without_mounts()
    programs = binaries()
    if programs is None:
        skip_or_fail("PostgreSQL is not installed: apt-get install postgresql")
    shutil.copytree(model, folder / "model", copy_function=shutil.copyfile)  # readable by all
    (folder / "model").chmod(0o755)
    for name, text in (("admin-key", KEY), ("postgres-password", "a password: p@ss/w%rd")):
        (folder / name).write_text(text)
        (folder / name).chmod(0o444)
    port = str(free_port("127.0.0.1"))
    given = {"/path/to/checkpoint": folder / "model", "/etc/agentic": folder}
    variables = {"PROXY_PORT": port, **documented({k: str(v) for k, v in given.items()})}
    images = {VLLM: engine, "docker.io/library/postgres": postgres_image(programs)}
    async with (
        composed(variables, images, folder) as found,
        ProxyClient(f"http://127.0.0.1:{port}", KEY) as control,
    ):
        yield found, control


def documented(edits: dict[str, str]) -> dict[str, str]:
    """The variables that the page exports before `docker compose up`, with these paths."""
    page = (ROOT / "docs/deployment.md").read_text()
    exports, _, _ = page.partition("docker compose -f docker/compose.yaml up")
    block = exports.rpartition("```bash")[2]
    for written, path in edits.items():
        block = block.replace(written, path)
    return dict(re.findall(r"(\w+)=(\S+)", block))


async def ask(session: SessionHandle, text: str, http: aiohttp.ClientSession) -> int:
    """The status, 0 without an answer."""
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 8}
    headers = {"Authorization": f"Bearer {session.api_key}"}
    try:
        async with http.post(
            f"{session.base_url}/chat/completions", json=body, headers=headers
        ) as answer:
            await answer.read()
            return answer.status
    except aiohttp.ClientConnectionError:
        return 0


async def turns(control: ProxyClient, session: SessionHandle) -> list[Turn]:
    _, found = await control.get_turns(session.trial_id)
    assert all(turn.status is TurnStatus.DONE for turn in found)
    return found


def content(turn: Turn) -> tuple[object, ...]:
    ids = (turn.prompt_ids.tolist(), turn.sampled_ids.tolist(), turn.logprobs.tolist())
    return (*ids, turn.versions, turn.request, turn.request_key, turn.finish_reason)


async def test_compose_records_and_loses_nothing_when_its_proxy_is_killed(
    tiny_model: Path, tmp_path: Path
) -> None:
    async with (
        project(tiny_model, tmp_path) as (found, control),
        aiohttp.ClientSession() as http,
    ):
        await found.up()
        assert [*found.services] == ["postgres", "vllm", "proxy"]
        async with http.get(control.base_url) as page:
            assert page.status == 200
            assert "<html" in (await page.text()).lower()

        session = await control.create_session()
        assert session.base_url.startswith(control.base_url)
        assert await ask(session, "Hi.", http) == 200
        (before,) = await turns(control, session)
        assert list(before.sampled_ids) == ANSWER

        proxy = found.services["proxy"]
        proxy.kill()
        await proxy.healthy()
        assert proxy.started == 2
        (after,) = await turns(control, session)
        assert content(after) == content(before)
        assert await ask(session, "And again?", http) == 200
        assert len(await turns(control, session)) == 2

        machines = [each.machine for each in found.services.values()]
        assert (await found.down())["proxy"] == 0
        assert [processes(machine) for machine in machines] == [{}, {}, {}]
    remaining = ip("netns", "list")
    assert not [machine for machine in machines if machine in remaining]


async def test_sessions_are_there_after_down_and_up(tiny_model: Path, tmp_path: Path) -> None:
    async with (
        project(tiny_model, tmp_path) as (found, control),
        aiohttp.ClientSession() as http,
    ):
        await found.up()
        session = await control.create_session()
        assert await ask(session, "Hi.", http) == 200
        (before,) = await turns(control, session)
        await found.down()
        await found.up()
        (after,) = await turns(control, session)
        assert content(after) == content(before)


def test_missing_variable_is_refused_with_what_it_is() -> None:
    with pytest.raises(ValueError, match="MODEL_DIR is not set: the folder of the checkpoint"):
        filled(text_of(COMPOSE), {})


def test_public_url_has_the_published_port() -> None:
    text = text_of(COMPOSE)
    needed = dict.fromkeys(("MODEL_DIR", "ADMIN_KEY_FILE", "POSTGRES_PASSWORD_FILE"), "/x")
    assert "AGENTIC_PROXY_PUBLIC_URL: http://127.0.0.1:9000" in filled(
        text, {**needed, "PROXY_PORT": "9000"}
    )
