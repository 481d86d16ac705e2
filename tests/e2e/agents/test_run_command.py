"""`agentic-proxy run` with unmodified agents: they reach the proxy without any other setting."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from proxy.commands.agent_environment import FOLDER
from proxy.conversation.first_words import first_words
from proxy.records import Turn
from tests.e2e.agents.model import play
from tests.e2e.agents.test_agents import AGENTS, PROMPT, proxy
from tests.needs import needs
from tests.proxy.conftest import ADMIN_KEY, RunningProxy

__all__ = ["proxy"]
pytestmark = [
    pytest.mark.agents,
    needs(None if (AGENTS / ".ready").exists() else f"no {AGENTS}: make agents"),
]
CODEX = ["codex", "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
CODEX += [PROMPT]
CLAUDE = ["claude", "-p", PROMPT, "--dangerously-skip-permissions"]


MEMORY = "Remember that the fox is called Reineke."
DEAD = "http://127.0.0.1:9"
"""Where the user's own settings send an agent; nobody listens there."""
CODEX_SETTINGS = f"""
model = "gpt-of-the-user"
model_provider = "mine"
[model_providers.mine]
name = "mine"
base_url = "{DEAD}/v1"
wire_api = "responses"
"""


async def run(proxy: RunningProxy, folder: Path, session: str, *command: str) -> str:
    """Runs the command in `folder/work`, `folder/home` is the user's; returns what it said."""
    work, home = folder / "work", folder / "home"
    work.mkdir(exist_ok=True)
    home.mkdir(exist_ok=True)
    environment = {
        **os.environ,
        "HOME": str(home),
        "PATH": f"{AGENTS}/bin:{os.environ['PATH']}",
        "AGENTIC_PROXY_ADMIN_KEY": ADMIN_KEY,
        "IS_SANDBOX": "1",  # for Claude Code, which is run by root
    }
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "proxy", "run", "--url", proxy.url, "--session", session),
        *("--store", f"sqlite:///{folder}/proxy.db", *command),
        cwd=work,
        env=environment,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await process.communicate()
    said = output.decode(errors="replace")[-3000:]
    assert process.returncode == 0, said
    return said


async def sent(proxy: RunningProxy, session: str) -> str:
    """All that the agent has sent."""
    _, turns = await proxy.control.get_turns(session)
    assert turns
    return json.dumps([turn.request for turn in turns], default=str)


def assert_known_by_its_words(turns: Sequence[Turn]) -> None:
    """The user's, and not those with which an agent asks for a title."""
    words = first_words([turn.request for turn in turns])
    assert PROMPT.startswith(words.strip('"…')), words  # opencode puts them in quotes
    assert words


@pytest.mark.parametrize("command", [CLAUDE, CODEX], ids=["claude", "codex"])
async def test_users_own_agent_has_the_users_memory_and_another_base_url_only(
    command: list[str], proxy: RunningProxy, tmp_path: Path
) -> None:
    home = tmp_path / "home"
    for name, memory in ((".claude", "CLAUDE.md"), (".codex", "AGENTS.md")):
        (home / name).mkdir(parents=True)
        (home / name / memory).write_text(MEMORY)
    (home / ".codex/config.toml").write_text(CODEX_SETTINGS)
    mine = {"ANTHROPIC_BASE_URL": DEAD, "ANTHROPIC_AUTH_TOKEN": "mine"}
    (home / ".claude/settings.json").write_text(json.dumps({"env": mine, "model": "opus"}))
    said = await run(proxy, tmp_path, "own", "--", *command)
    assert (tmp_path / "work/out.txt").read_text() == "hi\n", said
    _, turns = await proxy.control.get_turns("own")
    assert len(turns) >= 3
    assert f"session own: {len(turns)} turns" in said
    assert_known_by_its_words(turns)
    assert MEMORY in await sent(proxy, "own")
    await run(proxy, tmp_path, "isolated", "--isolated", "--", *command)
    assert MEMORY not in await sent(proxy, "isolated")


OWN = {
    "opencode": (
        ["opencode", "run", PROMPT],
        ".config/opencode/AGENTS.md",
        ".config/opencode/opencode.json",
        {
            "model": "mine/gpt",
            "provider": {
                "mine": {
                    "npm": "@ai-sdk/openai-compatible",
                    "options": {"baseURL": DEAD},
                    "models": {"gpt": {}},
                }
            },
        },
    ),
    "qwen": (
        ["qwen", "-y", PROMPT],
        ".qwen/QWEN.md",
        ".qwen/settings.json",
        {
            "security": {"auth": {"selectedType": "openai", "baseUrl": DEAD, "apiKey": "mine"}},
            "model": {"name": "mine"},
        },
    ),
    "pi": (
        ["pi", "-p", PROMPT],
        ".pi/agent/AGENTS.md",
        ".pi/agent/settings.json",
        {"defaultProvider": "mine", "defaultModel": "gpt"},
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("agent", OWN)
async def test_other_agents_have_the_users_memory_and_another_base_url_only(
    agent: str, proxy: RunningProxy, tmp_path: Path
) -> None:
    command, memory, settings, mine = OWN[agent]
    for name, text in ((memory, MEMORY), (settings, json.dumps(mine))):
        (tmp_path / "home" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "home" / name).write_text(text)
    said = await run(proxy, tmp_path, "own", "--", *command)
    assert (tmp_path / "work/out.txt").read_text() == "hi\n", said
    assert MEMORY in await sent(proxy, "own")
    _, turns = await proxy.control.get_turns("own")
    assert_known_by_its_words(turns)
    kept = json.loads((tmp_path / "home" / settings).read_text())
    assert kept | mine == kept  # an agent may add to it


async def test_mini_swe_agent_keeps_its_last_run_in_the_users_home(
    proxy: RunningProxy, tmp_path: Path
) -> None:
    folder = tmp_path / "home/.config/mini-swe-agent"
    folder.mkdir(parents=True)
    mine = f"MSWEA_MODEL_NAME=openai/mine\nOPENAI_API_BASE={DEAD}\n"
    (folder / ".env").write_text(mine)
    await run(proxy, tmp_path, "own", "--", "mini", "-y", "--exit-immediately", "-t", PROMPT)
    assert (tmp_path / "work/out.txt").read_text() == "hi\n"
    assert (folder / "last_mini_run.traj.json").is_file()
    assert (folder / ".env").read_text() == mine


async def test_user_rates_a_session_by_claude_codes_slash_command(
    proxy: RunningProxy, tmp_path: Path
) -> None:
    commands = tmp_path / "home/.claude/commands"
    commands.mkdir(parents=True)
    for file in (FOLDER / "commands/claude_code").glob("*.md"):
        shutil.copy(file, commands)
    rate = ["claude", "-p", '/rate down --comment "It broke the tests."']
    said = await run(proxy, tmp_path, "s", "--", *rate)
    shown = await proxy.control.show("s")
    assert [(each["key"], each["value"]) for each in shown["rewards"]] == [("rating", 0.0)], said
    assert "noted: it is kept when the agent ends" in await sent(proxy, "s")
    await run(proxy, tmp_path, "t", "--", "claude", "-p", "/tag topic=till")
    assert (await proxy.control.show("t"))["metadata"]["topic"] == "till"


async def test_user_rates_a_session_by_codexs_skill(proxy: RunningProxy, tmp_path: Path) -> None:
    """The model reads in the skill what to run, which the scripted one does, too."""
    shutil.copytree(FOLDER / "commands/codex", tmp_path / "home/.codex/skills")
    command = "${AGENTIC_PROXY:-agentic-proxy} sessions rate this"

    def rates(prompt: str) -> str:
        return play(prompt, [f"{command} down --comment 'It broke.'"] if command in prompt else [])

    proxy.answers(rates)
    said = await run(proxy, tmp_path, "s", "--", *CODEX[:-1], "$rate down, it broke the tests")
    shown = await proxy.control.show("s")
    assert [(each["key"], each["value"]) for each in shown["rewards"]] == [("rating", 0.0)], said


async def test_user_tags_a_session_by_codexs_skill(proxy: RunningProxy, tmp_path: Path) -> None:
    shutil.copytree(FOLDER / "commands/codex", tmp_path / "home/.codex/skills")
    command = "${AGENTIC_PROXY:-agentic-proxy} sessions tag this"

    def tags(prompt: str) -> str:
        return play(prompt, [f"{command} topic=till kept=yes"] if command in prompt else [])

    proxy.answers(tags)
    said = await run(proxy, tmp_path, "s", "--", *CODEX[:-1], "$tag topic=till kept=yes")
    found = (await proxy.control.show("s"))["metadata"]
    assert (found.get("topic"), found.get("kept")) == ("till", "yes"), said
    assert "noted: it is kept when the agent ends" in await sent(proxy, "s")


async def test_claude_code_continues_its_last_conversation(
    proxy: RunningProxy, tmp_path: Path
) -> None:
    command = ["claude", "-p", "--dangerously-skip-permissions"]
    await run(proxy, tmp_path, "yesterday", "--", *command, f"Words of yesterday. {PROMPT}")
    await run(proxy, tmp_path, "today", "--", *command, "-c", PROMPT)
    assert "Words of yesterday." in await sent(proxy, "today")
