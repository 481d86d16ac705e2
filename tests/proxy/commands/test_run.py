"""`agentic-proxy run`: the proxy that it finds or starts, the agent's life, the summary."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from proxy import wall
from proxy.commands.agent_environment import find_agent, known_agents
from proxy.rendering.rendering import Rendering
from proxy.settings.state_folder import default_store
from proxy.testing.scripted_engine import ScriptedEngine, text_script
from tests.proxy.conftest import ADMIN_KEY, RunningProxy

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


async def start(folder: Path, *arguments: str) -> asyncio.subprocess.Process:
    """The command in its own process, which forks."""
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "proxy", "run", *arguments),
        cwd=folder,
        env={**os.environ, "AGENTIC_PROXY_ADMIN_KEY": ADMIN_KEY},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


async def run(folder: Path, *arguments: str) -> tuple[int | None, str, str]:
    process = await start(folder, *arguments)
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
