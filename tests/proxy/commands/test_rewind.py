"""`agentic-proxy rewind`: continuations of a recorded session, each in a folder of its own."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest

from proxy.extras.rewind.command import Continuation, _row
from proxy.records import FOLDER, TurnStatus
from tests.proxy.branching.agent import SmallAgent, plays
from tests.proxy.conftest import ADMIN_KEY, RunningProxy

AGENT = """
import json, os, pathlib, urllib.request

def ask(messages):
    tools = json.load(open("tools.json"))
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({"model": "m", "messages": messages, "tools": tools}).encode(),
        {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"],
         "Content-Type": "application/json"},
    )
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]

here = os.getcwd()
notes = "".join(c if c.isalnum() else "-" for c in here)  # as Claude Code names a project
messages = [{"role": "system", "content": f"You work in {here}, your notes are in {notes}."},
            {"role": "user", "content": "Do the task."}]
while (answer := ask(messages)).get("tool_calls"):
    messages.append({k: answer[k] for k in ("role", "content", "tool_calls")})
    for call in answer["tool_calls"]:
        command = json.loads(call["function"]["arguments"])["command"]
        with open("log.txt", "a") as log:
            log.write(command + os.linesep)
        content = pathlib.Path("seed.txt").read_text() + command
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": content})
"""
SEED = "seed "


async def rewind(folder: Path, proxy: RunningProxy, *arguments: str) -> tuple[int | None, str, str]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "proxy", "rewind", *arguments[:1], "--url", proxy.url),
        *("--sandbox", "off", *arguments[1:], "--", sys.executable, "agent.py"),
        cwd=folder,
        env={**os.environ, "AGENTIC_PROXY_ADMIN_KEY": ADMIN_KEY, "COLUMNS": "300"},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate()
    return process.returncode, out.decode(), err.decode()


@pytest.fixture
async def recorded(proxy: RunningProxy, tmp_path: Path) -> str:
    """The name of a session of five turns, which an agent in `tmp_path/first` has recorded."""
    proxy.answers(plays)
    first = tmp_path / "first"
    session = await proxy.control.create_session("demo", metadata={FOLDER: str(first)})
    notes = "".join(each if each.isalnum() else "-" for each in str(first))
    agent = SmallAgent(proxy, session, system=f"You work in {first}, your notes are in {notes}.")
    agent.tool = lambda step: f"{SEED}step {step}"
    await agent.run()
    await proxy.control.complete("demo")
    proxy.engine.calls.clear()
    return "demo"


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    """The agent's folder as it was at its start."""
    import orjson

    from tests.proxy.branching.agent import TOOLS

    folder = tmp_path / "start"
    folder.mkdir()
    (folder / "agent.py").write_text(AGENT)
    (folder / "tools.json").write_bytes(orjson.dumps(TOOLS))
    (folder / "seed.txt").write_text(SEED)
    return folder


async def test_continuations_are_compared_in_a_table(
    proxy: RunningProxy, recorded: str, workspace: Path, tmp_path: Path
) -> None:
    options = ("--turn", "3", "-n", "2", "--workspace", str(workspace), "--check")
    code, out, err = await rewind(tmp_path, proxy, recorded, *options, "grep -q 'step 3' log.txt")
    assert code == 0, out + err
    lines = [line for line in out.splitlines() if line.startswith("demo.3.")]
    assert len(lines) == 2
    for line in lines:
        name, *rest = line.split()
        assert rest[:4] == ["0", "3", "+", "2"]
        assert rest[-1] == "check=1"
        _, turns = await proxy.control.get_turns(name)
        assert [t.status for t in turns] == [TurnStatus.CONTEXT] * 3 + [TurnStatus.DONE] * 2
    assert len(proxy.engine.calls) == 4
    logs = [*(tmp_path / "rewind").rglob("log.txt")]
    assert [log.read_text().split("\n") for log in logs] == [
        ["step 0", "step 1", "step 2", "step 3", ""]
    ] * 2


async def test_continuation_that_goes_another_way_is_named(
    proxy: RunningProxy, recorded: str, workspace: Path, tmp_path: Path
) -> None:
    (workspace / "seed.txt").write_text("other ")
    options = ("--turn", "4", "--workspace", str(workspace))
    code, out, _ = await rewind(tmp_path, proxy, recorded, *options)
    assert code == 1
    assert "turn 1: recorded 'seed step 0', got 'other step 0'" in out
    assert proxy.engine.calls == []
    code, out, err = await rewind(tmp_path, proxy, recorded, *options, "--live")
    assert code == 0, out + err
    assert len(proxy.engine.calls) == 4


async def test_table_shows_texts_that_look_like_markup(
    proxy: RunningProxy, recorded: str, workspace: Path, tmp_path: Path
) -> None:
    (workspace / "seed.txt").write_text("[/INST] ")
    options = ("--turn", "4", "--workspace", str(workspace))
    code, out, err = await rewind(tmp_path, proxy, recorded, *options)
    assert code == 1, err
    assert "turn 1: recorded 'seed step 0', got '[/INST] step 0'" in out


async def test_continuation_without_a_session_leaves_the_table_of_the_others(
    proxy: RunningProxy, recorded: str, workspace: Path, tmp_path: Path
) -> None:
    options = ("--turn", "4", "--workspace", str(workspace), "--agent", "nobody", "--check")
    code, out, err = await rewind(tmp_path, proxy, recorded, *options, "true")
    assert (code, err) == (1, "")
    assert "not started; see " in out


async def test_session_of_a_killed_continuation_is_completed(
    proxy: RunningProxy, tmp_path: Path
) -> None:
    await proxy.control.create_session("left")
    async with asyncio.timeout(10):
        row = await _row(proxy.control, Continuation("left", tmp_path, -9))
    assert row[:2] == ["left", "-9"]
    assert (await proxy.control.show("left"))["status"] == "completed"


async def test_wrong_arguments_are_refused(
    proxy: RunningProxy, recorded: str, tmp_path: Path
) -> None:
    code, _, err = await rewind(tmp_path, proxy, recorded, "--turn", "6")
    assert (code, err) == (
        2,
        "agentic-proxy: --turn 6: session demo has 5 turns; give a number from 1 to 5\n",
    )
    code, _, err = await rewind(tmp_path, proxy, recorded, "--turn", "1", "--workspace", "no")
    assert (code, err) == (2, "agentic-proxy: --workspace no: there is no such folder\n")
    code, _, err = await rewind(tmp_path, proxy, recorded, "--turn", "1", "--answer", "no")
    assert code == 2
    assert "--answer no: " in err
