"""Histories of real agents that their clients rewrite: edits with defaults, trimmed and coerced
arguments, pictures and documents. None of it forks, and nothing is refused."""

from __future__ import annotations

import base64
import re
import struct
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agent_loop.records import Rollout, RolloutStatus
from tests.e2e.agents.model import DONE, call, offered_tools, shell_call
from tests.e2e.agents.test_agents import example, pytestmark, trial
from tests.e2e.agents.test_hard_cases import plays
from tests.proxy.conftest import RunningProxy, StartProxy

__all__ = ["pytestmark"]


@pytest.fixture
async def proxy(start_proxy: StartProxy) -> RunningProxy:
    return await start_proxy(max_context_tokens=131_072)


Step = str | Callable[[str], str]


def in_order(*steps: Step) -> Callable[[str], str]:
    """A policy that makes one step per prompt, by the number of tool results in it."""

    def play(prompt: str) -> str:
        done = prompt.count("<tool_response>\n")
        if done >= len(steps):
            return DONE
        step = steps[done]
        return step if isinstance(step, str) else step(prompt)

    return play


async def events(proxy: RunningProxy, rollout: Rollout, kind: str) -> list[dict[str, Any]]:
    found = [each async for each in proxy.control.events(rollout.trial_id)]
    return [each for each in found if each["kind"] == kind]


async def assert_one_path(proxy: RunningProxy, rollout: Rollout, folder: Path, turns: int) -> None:
    log = (Path(rollout.logs or "") / "agent.log").read_text(errors="replace")[-3000:]
    assert rollout.status is RolloutStatus.DONE, f"{rollout.error}\n{log}"
    refused = await events(proxy, rollout, "refused")
    assert not refused, refused
    assert rollout.reward == 1.0, log
    assert (rollout.forks, rollout.num_turns) == ({}, turns), log


def png(width: int = 3, height: int = 2) -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        whole = kind + data
        return struct.pack(">I", len(data)) + whole + struct.pack(">I", zlib.crc32(whole))

    rows = b"".join(b"\0" + b"\xff\x80\0" * width for _ in range(height))
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = [chunk(b"IHDR", head), chunk(b"IDAT", zlib.compress(rows)), chunk(b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


PDF = (
    b"%PDF-1.4\n1 0 obj<</Type/Catalog/Pages 2 0 R>>endobj\n2 0 obj<</Type/Pages/Kids[3 0 R]"
    b"/Count 1>>endobj\n3 0 obj<</Type/Page/Parent 2 0 R/MediaBox[0 0 72 72]>>endobj\n"
    b"trailer<</Root 1 0 R>>\n%%EOF\n"
)


def writes_file(name: str, data: bytes) -> str:
    return f"echo {base64.b64encode(data).decode()} | base64 -d > {name}"


def bash(command: str, **more: Any) -> str:
    return call("Bash", {"command": command, **more})


def folder_of(prompt: str) -> str:
    """The folder in which the agent works, as its prompt or a result of `pwd` names it."""
    found = re.findall(r"(?:[Ww]orking directory|CWD|cwd)[^/\n]*(/[^\s<\"]+)", prompt)
    return str(found[-1]).rstrip(".")


def edit(number: int, **more: Any) -> Callable[[str], str]:
    def step(prompt: str) -> str:
        arguments = {
            "file_path": f"{folder_of(prompt)}/out.txt",
            "old_string": f"line {number}\n",
            "new_string": f"Line {number}  \n",  # the client trims it
        }
        return call("Edit", {**arguments, **more})

    return step


async def test_edits_of_claude_code_do_not_fork(proxy: RunningProxy, tmp_path: Path) -> None:
    steps: list[Step] = [
        bash("for i in 1 2 3 4 5 6 7 8 9; do echo line $i; done > out.txt", timeout="60000"),
        lambda prompt: call(
            "Read", {"file_path": f"{folder_of(prompt)}/out.txt", "offset": "2", "limit": "3"}
        ),
        lambda prompt: call("Read", {"file_path": f"{folder_of(prompt)}/out.txt"}),
        *map(edit, range(1, 9)),
        lambda prompt: bash(f"cd {folder_of(prompt)} && find . -name out.txt -exec ls {{}} \\\\;"),
        bash("grep -q 'Line 8' out.txt && echo hi > out.txt"),
    ]
    plays(proxy, in_order(*steps))
    rollout = await trial(proxy, example("claude_code"), tmp_path)
    await assert_one_path(proxy, rollout, tmp_path, len(steps) + 1)
    changes = Counter(
        change
        for event in await events(proxy, rollout, "tidied")
        for each in event["calls"]
        for change in each["changes"]
    )
    assert changes["replace_all: default added"] == 8
    assert changes["new_string: blanks trimmed"] == 8
    assert changes["offset: text became a number"] == 1


async def test_pictures_and_documents_do_not_end_claude_code(
    proxy: RunningProxy, tmp_path: Path
) -> None:
    steps: list[Step] = [
        bash(f"{writes_file('a.png', png())} && {writes_file('a.pdf', PDF)}"),
        lambda prompt: call("Read", {"file_path": f"{folder_of(prompt)}/a.png"}),
        lambda prompt: call("Read", {"file_path": f"{folder_of(prompt)}/a.pdf"}),
        '<tool_call>\n{"name": "Bash", "arguments": {"command": "ls \\x"}}\n</tool_call>',
        bash("echo hi > out.txt"),
    ]
    plays(proxy, in_order(*steps))
    rollout = await trial(proxy, example("claude_code"), tmp_path)
    shown = [
        part["type"]
        for event in await events(proxy, rollout, "shown_as_text")
        for part in event["parts"]
    ]
    assert "image" in shown
    await assert_one_path(proxy, rollout, tmp_path, len(steps) + 1)


async def test_codex_with_its_own_model_is_served(proxy: RunningProxy, tmp_path: Path) -> None:
    """It sends its tools as an item of the input."""
    command = example("codex")
    argv = [part for part in command.argv if part != 'model="{model}"']
    at = next(i for i, part in enumerate(argv) if part == "-c" and argv[i + 1] == "-c")
    command = command.model_copy(update={"argv": tuple(argv[:at] + argv[at + 1 :])})
    plays(proxy, lambda prompt: DONE)
    rollout = await trial(proxy, command, tmp_path, check=("true",))
    prompt = proxy.rendering.tokenizer.decode(proxy.engine.calls[-1].prompt_ids)
    assert offered_tools(prompt)
    await assert_one_path(proxy, rollout, tmp_path, 1)


PATCH = """*** Begin Patch
*** Add File: out.txt
+hi
*** End Patch"""


async def test_patches_and_pictures_do_not_fork_codex(proxy: RunningProxy, tmp_path: Path) -> None:
    """Its `apply_patch`, by the shell where it offers no tool of that name, and `view_image`."""

    def shell(prompt: str, command: str) -> str:
        return shell_call("exec_command", command, offered_tools(prompt))

    def patch(prompt: str) -> str:
        if "apply_patch" in offered_tools(prompt):
            return call("apply_patch", {"input": PATCH})
        return shell(prompt, f"apply_patch <<'EOF'\n{PATCH}\nEOF")

    steps: list[Step] = [
        lambda prompt: shell(prompt, writes_file("a.png", png())),
        lambda prompt: call("view_image", {"path": "a.png"}),
        patch,
        lambda prompt: shell(prompt, "cat out.txt"),
    ]
    plays(proxy, in_order(*steps))
    rollout = await trial(proxy, example("codex"), tmp_path)
    parts = [part for e in await events(proxy, rollout, "shown_as_text") for part in e["parts"]]
    assert [part["type"] for part in parts] == ["input_image"]
    await assert_one_path(proxy, rollout, tmp_path, len(steps) + 1)
