"""Every tool of every agent, in each family's format: no needless fork, no refused request, no
changed argument. `python -m tests.e2e.agents.census` has the same as a table, for all families."""

from __future__ import annotations

import hashlib
import os
from dataclasses import replace
from pathlib import Path

import pytest

from proxy.testing.scripted_engine import ScriptedEngine
from tests.e2e.agents.census.agents import agents
from tests.e2e.agents.census.families import CONTEXT_TOKENS, FAMILIES, Writer, write_family
from tests.e2e.agents.census.policy import REPORT
from tests.e2e.agents.census.run import run_agent
from tests.e2e.agents.test_agents import SCRIPTS, pytestmark
from tests.proxy.conftest import starting_proxies

__all__ = ["pytestmark"]

IN_CI = ("codex", "pi")
LONG = (
    *("claude_code", "codex_default", "opencode", "opencode_responses", "opencode_messages"),
    *("qwen_code", "gemini_cli", "kimi_code", "cline", "goose"),
)


@pytest.fixture(scope="module")
def writer(tmp_path_factory: pytest.TempPathFactory) -> tuple[Writer, Path]:
    """Qwen3.5, whose calls are tags, with a small vocabulary."""
    family = FAMILIES["qwen3.5"]
    folder = write_family(family, tmp_path_factory.mktemp("qwen3.5"), None)
    return Writer(family, folder), folder


@pytest.mark.parametrize(
    "name", [*IN_CI, *(pytest.param(name, marks=pytest.mark.long) for name in LONG)]
)
async def test_every_tool_is_driven_without_fork_refusal_or_changed_argument(
    name: str, writer: tuple[Writer, Path], tmp_path: Path
) -> None:
    family, folder = writer
    async with starting_proxies(folder, family.rendering, tmp_path) as start:
        proxy = await start(max_context_tokens=CONTEXT_TOKENS)
        row, *_ = await run_agent(agents()[name], proxy, family, tmp_path, timeout_s=300)
    assert row.faults() == []
    ends = {call for call, _ in agents()[name].last.calls}
    assert set(row.offered) - set(row.driven) <= ends
    assert row.turns > len(row.offered)


async def test_claude_code_works_and_resumes_without_fork_refusal_or_changed_argument(
    writer: tuple[Writer, Path], tmp_path: Path
) -> None:
    """The fast half: without the calls that are drawn from the schemas, and without compaction."""
    family, folder = writer
    agent = agents()["claude_code"]
    async with starting_proxies(folder, family.rendering, tmp_path) as start:
        proxy = await start(max_context_tokens=CONTEXT_TOKENS)
        row, policy, *_ = await run_agent(
            replace(agent, argvs=agent.argvs[:2]),
            proxy,
            family,
            tmp_path,
            timeout_s=300,
            plan=agent.work_plan,
        )
    assert row.faults() == []
    assert row.designed == {"sub-agent": 4}
    made = policy.counts()
    assert {"Read", "Write", "Edit", "Bash", "Agent", "SendMessage", "TaskUpdate"} <= made.keys()


async def test_agent_that_the_user_installs_is_found_on_path(
    writer: tuple[Writer, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in with the command line and the settings of Crush."""
    family, folder = writer
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/crush").symlink_to(SCRIPTS / "crush_stand_in.py")
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    crush = agents()["crush"]
    assert crush.is_installed()
    async with starting_proxies(folder, family.rendering, tmp_path) as start:
        proxy = await start(max_context_tokens=CONTEXT_TOKENS)
        row, policy, *_ = await run_agent(
            replace(crush, steps=()), proxy, family, tmp_path, timeout_s=300
        )
    assert row.faults() == []
    assert row.version == "stand-in"
    assert row.offered == row.driven == ["bash", "edit", "view", "write"]
    assert (row.paths, row.designed) == (1, {})
    assert policy.written[-1].answer.text == REPORT


@pytest.mark.parametrize("name", ["codex", pytest.param("claude_code", marks=pytest.mark.long)])
async def test_pictures_that_an_agent_reads_are_images_of_its_record(
    name: str, tmp_path: Path
) -> None:
    """Codex's `view_image`, and Claude Code's `Read` of a file, with a model that reads images."""
    family = FAMILIES["qwen3-vl"]
    folder = write_family(family, tmp_path / "qwen3-vl", None)
    seeing = Writer(family, folder)
    token = seeing.rendering.image_token
    async with (
        ScriptedEngine(lambda _: [], image_token=token) as engine,
        starting_proxies(folder, seeing.rendering, tmp_path) as start,
    ):
        proxy = await start(engine=engine, max_context_tokens=CONTEXT_TOKENS)
        while not (await proxy.control.engines())[0]["images"]:
            await engine.checked.wait()
        row, _, _, turns = await run_agent(agents()[name], proxy, seeing, tmp_path, timeout_s=300)
    assert row.faults() == []
    images = {image.sha256 for turn in turns for image in turn.images}
    seen = {data for call in engine.calls for data in engine.images.seen(call)}
    assert len(seen) == len(images) == row.images
    if name == "codex":
        sent = (tmp_path / "template/picture.png").read_bytes()
        assert seen == {sent}
        assert images == {hashlib.sha256(sent).hexdigest()}
    else:  # Claude Code encodes the picture again, and also sends the page of a document
        assert row.images == 2
