"""`agentic-proxy run`: the proxy that it finds or starts, the agent's life, the summary.

It may start a hosted model (`proxy.extras.engines`), and names the page (`proxy.extras.view`)."""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from aiohttp import web

from proxy import wall
from proxy.commands.agent_environment import find_agent, known_agents
from proxy.rendering.rendering import Rendering
from proxy.settings.state_folder import default_store
from proxy.testing.scripted_engine import ScriptedEngine, text_script
from tests.company_network import PrivateAuthority
from tests.proxy.conftest import ADMIN_KEY, RunningProxy, StartProxy

AGENT = """
import json, os, sys, urllib.request
if len(sys.argv) > 1 and os.path.exists(sys.argv[1]) and open(sys.argv[1], "rb").read():
    sys.exit("I can read the proxy's files")
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    json.dumps({"messages": [{"role": "user", "content": "Hi."}]}).encode(),
    {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"},
)
print(json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"])
assert "AGENTIC_PROXY_ADMIN_KEY" not in os.environ
sys.exit(7)
"""
needs_wall = pytest.mark.skipif(wall.missing() is not None, reason=f"no wall: {wall.missing()}")


async def start(folder: Path, *arguments: str, **variables: str) -> asyncio.subprocess.Process:
    """The command in its own process, which forks."""
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "proxy", "run", *arguments),
        cwd=folder,
        env={**os.environ, "AGENTIC_PROXY_ADMIN_KEY": ADMIN_KEY, **variables},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


async def run(folder: Path, *arguments: str, **variables: str) -> tuple[int | None, str, str]:
    process = await start(folder, *arguments, **variables)
    out, err = await process.communicate()
    return process.returncode, out.decode(), err.decode()


@needs_wall
async def test_agent_runs_in_a_recorded_session_and_its_exit_code_is_kept(
    proxy: RunningProxy, tmp_path: Path
) -> None:
    work = tmp_path / "work"
    work.mkdir()
    (work / "agent.py").write_text(AGENT)
    agent = ("--", sys.executable, "agent.py", str(tmp_path / "proxy.db"))
    store = ("--store", f"sqlite:///{tmp_path}/proxy.db")
    more = ("--url", proxy.url, "--session", "team/one", "--tag", "task_id=t-1", *store)
    code, out, err = await run(work, *more, *agent)
    assert (code, out) == (7, "Hello.\n"), err
    assert "session team/one: 1 turns, " in err
    assert "forks: none" in err
    assert "agentic-proxy export team/one --format messages" in err
    session, turns = await proxy.control.get_turns("team/one")
    assert (session.status, len(turns)) == ("completed", 1)
    assert session.metadata == {
        "task_id": "t-1",
        "agent": Path(sys.executable).name,
        "folder": str(work),
    }

    code, _, err = await run(work, *more, *agent)
    assert (code, err) == (2, "agentic-proxy: --session team/one: exists; choose another name\n")


@needs_wall
async def test_user_rates_and_tags_the_session_from_inside_the_agent(
    proxy: RunningProxy, tmp_path: Path
) -> None:
    proxy_command = f"{sys.executable} -m proxy sessions"
    script = (
        f"{proxy_command} rate this down --comment 'It broke the tests.' &&"
        f" {proxy_command} tag this topic=tests && {proxy_command} rate this 0.5 &&"
        ' echo \'{"tags": 5, "value": "x"}\' >>$AGENTIC_PROXY_NOTES &&'
        " echo '{\"value\": 9' >>$AGENTIC_PROXY_NOTES"
    )
    git = ("git", "init", "-q", "-b", "repairs", tmp_path)
    assert await (await asyncio.create_subprocess_exec(*git)).wait() == 0
    arguments = ("--url", proxy.url, "--session", "s", "--", "sh", "-c", script)
    code, out, err = await run(tmp_path, *arguments)
    assert (code, out) == (0, "noted: it is kept when the agent ends\n" * 3), err
    shown = await proxy.control.show("s")
    assert [(each["key"], each["value"]) for each in shown["rewards"]] == [("rating", 0.5)]
    assert shown["metadata"]["topic"] == "tests"
    assert shown["metadata"]["git_branch"] == "repairs"
    assert err.count("a note of the session is not kept: ") == 1


@pytest.mark.parametrize("trap", ["mkfifo", "mkdir", "ln -s /dev/zero"])
async def test_notes_that_are_no_file_end_nothing(
    trap: str, proxy: RunningProxy, tmp_path: Path
) -> None:
    script = f"{trap} $AGENTIC_PROXY_NOTES"
    arguments = ("--url", proxy.url, "--session", "s", "--sandbox", "off", "--", "sh", "-c", script)
    async with asyncio.timeout(60):
        code, _, err = await run(tmp_path, *arguments)
    assert (code, "session s: 0 turns" in err) == (0, True), err


async def test_commands_that_are_printed_work_where_they_are_printed(
    proxy: RunningProxy, tmp_path: Path
) -> None:
    work = tmp_path / "a project"
    work.mkdir()
    store = ("--store", f"sqlite:///{tmp_path}/proxy.db")
    at = ("--url", proxy.url, "--sandbox", "off")
    _, _, err = await run(work, *at, *store, "--session", "a/b", "--", "true")
    printed = [shlex.split(line) for line in err.splitlines() if line.startswith("  agentic-")]
    assert [words[1] for words in printed] == ["sessions", "export"]
    for _, *words in printed:
        program = (sys.executable, "-m", "proxy", *words)
        assert await (await asyncio.create_subprocess_exec(*program, cwd=work)).wait() == 0
    assert (work / "session.jsonl").is_file()
    _, _, err = await run(work, *at, "--session", "c", "--", "true")  # of another store than ours
    printed = [shlex.split(line) for line in err.splitlines() if line.startswith("  agentic-")]
    assert [words[1] for words in printed] == ["sessions", "export"]
    (work / "session.jsonl").unlink()
    environment = {**os.environ, "AGENTIC_PROXY_ADMIN_KEY": ADMIN_KEY}
    for _, *words in printed:
        program = (sys.executable, "-m", "proxy", *words)
        asked = await asyncio.create_subprocess_exec(*program, cwd=work, env=environment)
        assert await asked.wait() == 0
    assert (work / "session.jsonl").is_file()
    assert f"  {proxy.url}/#/trial/c\n" in err


async def test_refused_call_is_told_at_the_end_and_is_in_the_record(
    start_proxy: StartProxy, tmp_path: Path
) -> None:
    proxy = await start_proxy(max_context_tokens=1000)
    (tmp_path / "agent.py").write_text(AGENT.replace('"Hi."', '"Hi. " * 5000'))
    agent = ("--sandbox", "off", "--", sys.executable, "agent.py")
    code, _, err = await run(tmp_path, "--url", proxy.url, "--session", "s", *agent)
    assert code == 1
    assert "session s: 0 turns" in err
    (told,) = [line for line in err.splitlines() if line.startswith("  refused with 400: ")]
    show = (sys.executable, "-m", "proxy", "sessions", "show", "s")
    store = ("--store", f"sqlite:///{tmp_path}/proxy.db")
    shown = await asyncio.create_subprocess_exec(*show, *store, stdout=asyncio.subprocess.PIPE)
    assert told.strip() in (await shown.communicate())[0].decode().splitlines()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("sandbox", [pytest.param("light", marks=needs_wall), "off"])
async def test_interrupt_ends_the_agent_and_completes_the_session(
    number: signal.Signals, sandbox: str, proxy: RunningProxy, tmp_path: Path
) -> None:
    fifo = tmp_path / "alive"
    os.mkfifo(fifo)
    script = f"exec 3>{fifo}; echo up >&3; sleep 600 & wait"
    options = ("--url", proxy.url, "--session", "s", "--sandbox", sandbox)
    process = await start(tmp_path, *options, "--", "sh", "-c", script)
    reader = await asyncio.to_thread(open, fifo)
    assert await asyncio.to_thread(reader.readline) == "up\n"
    process.send_signal(number)
    assert await asyncio.to_thread(reader.read) == ""  # all processes of the agent have ended
    reader.close()
    _, err = await process.communicate()
    assert process.returncode == 128 + signal.SIGTERM, err
    assert b"session s: 0 turns" in err
    session, _ = await proxy.control.get_turns("s")
    assert session.status == "completed"


WALLED = """
import os
from proxy.commands.foreground import run_agent
print(run_agent(["sh", "-c", "echo up; sleep 600 & wait"], dict(os.environ), [], walled=True))
"""


@needs_wall
def test_agent_that_is_ended_in_its_first_moment_needs_no_kill() -> None:
    """The signal was lost where it came before the wall's first process could pass it on."""
    for _ in range(20):
        with subprocess.Popen([sys.executable, "-c", WALLED], stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"up\n"
            process.terminate()
            assert process.stdout.read() == b"%d\n" % -signal.SIGTERM


@needs_wall
async def test_proxy_is_started_for_a_model_and_stopped_at_the_end(
    checkpoint: Path, rendering: Rendering, tmp_path: Path
) -> None:
    script = text_script(
        lambda _: "Hello.",
        decode=rendering.tokenizer.decode,
        encode=rendering.tokenizer.encode,
        end_ids=[rendering.tokenizer.convert_tokens_to_ids("<|im_end|>")],
    )
    (tmp_path / "agent.py").write_text(AGENT)
    async with ScriptedEngine(script) as engine:
        model = ("--model", str(checkpoint), "--engine", engine.url)
        agent = ("--", sys.executable, "agent.py", f"{default_store()}.admin-key")
        # A closed port: nothing answers at the default address of the configuration.
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "proxy", "run", *model, *agent),
            cwd=tmp_path,
            env={**os.environ, "AGENTIC_PROXY_PORT": "9"},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, err = await process.communicate()
    assert (process.returncode, out) == (7, b"Hello.\n"), err.decode()
    assert b": 1 turns, " in err
    assert [path.name for path in tmp_path.iterdir()] == ["agent.py"]
    assert default_store().stat().st_mode & 0o777 == 0o600
    assert default_store().parent.stat().st_mode & 0o777 == 0o700


async def test_without_a_program_the_lines_for_shells_are_printed(
    proxy: RunningProxy, tmp_path: Path
) -> None:
    code, out, err = await run(tmp_path, "--url", proxy.url, "--session", "mine")
    assert code == 0, err
    export = next(line for line in out.splitlines() if line.startswith("export "))
    assert f"OPENAI_BASE_URL={proxy.url}/mine/v1 " in export
    assert f"ANTHROPIC_BASE_URL={proxy.url}/mine " in export
    assert f"GOOGLE_GEMINI_BASE_URL={proxy.url}/mine " in export
    assert f"set -gx ANTHROPIC_BASE_URL {proxy.url}/mine" in out.splitlines()
    key = next(line for line in out.splitlines() if line.startswith("set -gx OPENAI_API_KEY "))
    async with proxy.http.get(
        f"{proxy.url}/mine/v1/models", headers={"Authorization": f"Bearer {key.split()[-1]}"}
    ) as response:
        assert response.status == 200


async def test_key_that_is_not_the_proxys_is_refused_with_the_variables_that_name_it(
    proxy: RunningProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "ADMIN_KEY", "of-another-proxy")
    code, _, err = await run(tmp_path, "--url", proxy.url, "--", "true")
    assert code == 2
    assert "401 the control plane needs the admin key" in err
    assert "set AGENTIC_PROXY_ADMIN_KEY_FILE to that file or AGENTIC_PROXY_ADMIN_KEY to the" in err


async def test_proxy_whose_certificate_is_not_trusted_is_not_taken_for_none(tmp_path: Path) -> None:
    authority = PrivateAuthority(tmp_path, "localhost")
    async with authority.serving(web.Application()) as port:
        given = ("--url", f"https://localhost:{port}", "--", "true")
        code, _, err = await run(tmp_path, *given)
        assert (code, err.count("\n")) == (2, 1)
        assert f"the proxy at https://localhost:{port} is not trusted (" in err
        assert "certificate authority belongs into SSL_CERT_FILE" in err
        code, _, err = await run(tmp_path, *given, SSL_CERT_FILE=str(authority.ca))
    assert (code, "not a proxy: GET /health: 404" in err) == (2, True), err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--url", "http://127.0.0.1:9"], "no proxy answers at http://127.0.0.1:9; start one with"),
        (["--agent", "clod", "--", "x"], "--agent clod: unknown; use one of aider, claude-code,"),
    ],
)
async def test_wrong_arguments_are_refused(
    arguments: list[str], message: str, tmp_path: Path
) -> None:
    code, _, err = await run(tmp_path, *arguments)
    assert code == 2
    assert message in err


@pytest.mark.parametrize(
    "name", ["claude-code", "codex", "opencode", "qwen-code", "pi", "mini-swe-agent"]
)
def test_users_own_agent_keeps_its_home_and_is_not_told_that_it_is_in_a_sandbox(name: str) -> None:
    agent = known_agents()[name]
    own = agent.at_home(isolated=False)
    assert own is not agent
    assert agent.at_home(isolated=True) is agent
    elsewhere = {"HOME", "CLAUDE_CONFIG_DIR", "CODEX_HOME", "IS_SANDBOX", "XDG_CONFIG_HOME"}
    assert elsewhere & set(agent.env)
    assert not elsewhere & set(own.env)


def test_every_agent_of_the_examples_is_known_by_its_program() -> None:
    known = known_agents()
    assert known["claude-code"].program == "claude"
    assert known["codex"].program == "codex"
    assert known["codex"].flags
    assert known["pi"].program == "pi"
    assert find_agent(["/bin/sh", "-c", "x"], None).env == {}  # and no agent that a shell starts
    for agent in known.values():
        filled = agent.variables({"base_url": "B", "api_key": "K", "model": "M", "directory": "D"})
        values = [value for value in filled.values() if value is not None]
        assert not any("{model}" in value or "{directory}" in value for value in values)
