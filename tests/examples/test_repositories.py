"""Tasks of the example repositories: what is done, what is not, and what agents may not do."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from datetime import date
from pathlib import Path
from subprocess import PIPE

import pytest

from examples.claude_code import expert as claude_code
from examples.codex import expert as codex
from examples.repositories.tasks import FOLDER, REQUESTS, File, is_done, new_repository, new_task
from examples.starter_model.transcripts import Transcript
from examples.swe_agent import expert as swe_agent

EXAMPLES = FOLDER.parent


def written(folder: Path, repository: list[File]) -> Path:
    folder.mkdir(parents=True)
    for file in repository:
        (folder / f"{file.name}.py").write_text(file.text)
    return folder


def after(transcript: Transcript, folder: Path, task: dict[str, str]) -> None:
    """Does what the transcript's calls did to a copy of the repository."""
    for message, result in zip(transcript.messages, transcript.messages[1:], strict=False):
        for call in message.get("tool_calls", ()):
            given = json.loads(call["function"]["arguments"])
            if "updated successfully" in result["content"]:
                _replace(folder / given["file_path"], given["old_string"], given["new_string"])
            elif "has been edited" in result["content"]:
                _replace(folder / Path(given["path"]).name, given["old_str"], given["new_str"])
            elif "No replacement" in result["content"]:
                assert given["old_str"] not in (folder / Path(given["path"]).name).read_text()
            elif call["function"]["name"] == "bash":
                command = given["command"]
                run = subprocess.run(command, shell=True, cwd=folder, check=True, stdout=PIPE)
                said = f"OBSERVATION:\n{run.stdout.decode()}"
                assert result["content"] == (said if run.stdout else swe_agent.NOTHING)
            elif "Success. Updated" in result["content"]:
                name, old, new = _patched(given["cmd"])
                file = folder / name
                assert file.read_text().count(f"{old}\n") == 1
                file.write_text(file.read_text().replace(f"{old}\n", f"{new}\n"))
            elif call["function"]["name"] == "Bash":
                subprocess.run(given["command"], shell=True, cwd=folder, check=True)
            elif "apply_patch" in given.get("cmd", ""):
                name, old, _ = _patched(given["cmd"])
                assert "verification failed" in result["content"]
                assert f"{old}\n" not in (folder / name).read_text()
            elif "cmd" in given:
                command = given["cmd"]
                run = subprocess.run(command, shell=True, cwd=folder, check=True, stdout=PIPE)
                assert result["content"].endswith(f"\nOutput:\n{run.stdout.decode()}")


def _replace(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert text.count(old) == 1
    file.write_text(text.replace(old, new))


def _patched(command: str) -> tuple[str, str, str]:
    """The file of a patch, the line that it takes away, and the one that it adds."""
    lines = command.splitlines()
    (old,) = (line[1:] for line in lines if line.startswith("-"))
    (new,) = (line[1:] for line in lines if line.startswith("+"))
    (name,) = (line.split(": ")[1] for line in lines if line.startswith("*** Update File"))
    return name, old, new


EXPERTS: dict[str, Callable[[list[File], dict[str, str], random.Random], Transcript]] = {
    "claude_code": lambda repository, task, rng: claude_code.played(
        repository, task, date(2026, 1, 1), rng
    ),
    "codex": codex.played,
    "swe_agent": swe_agent.played,
}


@pytest.mark.parametrize("kind", REQUESTS)
@pytest.mark.parametrize("agent", EXPERTS)
def test_expert_does_each_kind_of_task_and_not_always(
    agent: str, kind: str, tmp_path: Path
) -> None:
    outcomes = set()
    for seed in range(150):
        rng = random.Random(seed)
        repository = new_repository(rng)
        task = new_task(rng, repository)
        if task["kind"] != kind:
            continue
        before = written(tmp_path / f"before-{seed}", repository)
        folder = written(tmp_path / f"after-{seed}", repository)
        assert not is_done(folder, before, task)
        played = EXPERTS[agent](repository, task, rng)
        after(played, folder, task)
        outcomes.add(is_done(folder, before, task))
    assert outcomes == {True, False}


FIX = {"kind": "fix", "file": "shop", "function": "total", "wanted": "sum"}
SHOP = File("shop", "COLOR", "jade", "total", ("price", "tax"), "*")
CART = File("cart", "FRAME", "amber", "change", ("left", "right"), "-")


@pytest.mark.parametrize(
    ("change", "done"),
    [
        ({"shop.py": SHOP.text.replace("*", "+")}, True),
        ({"shop.py": SHOP.text.replace("price * tax", "tax + price")}, True),
        ({"shop.py": SHOP.text.replace("price * tax", "price - tax")}, False),
        ({"shop.py": SHOP.text.replace("*", "+").replace("jade", "ivory")}, False),
        ({"shop.py": SHOP.text.replace("*", "+"), "cart.py": ""}, False),
        ({"shop.py": "import os\nos._exit(0)\n"}, False),
        ({"shop.py": SHOP.text.replace("price * tax", "__import__('os')._exit(0)")}, False),
        ({"shop.py": "(" * 5000}, False),
        ({"shop.py": "total = " + "-" * 20000 + "1"}, False),
        ({"shop.py": "\0"}, False),
        ({"shop.py": SHOP.text.replace("*", "+"), "tasks.py": "is_done = print"}, False),
    ],
)
def test_only_the_outcome_counts(change: dict[str, str], done: bool, tmp_path: Path) -> None:
    """In the verifier as it is started, in the folder that the agent left."""
    written(tmp_path / "folders/repository", [SHOP, CART])
    for name in ("tasks.py", "verify.py"):
        shutil.copy(EXAMPLES / name, tmp_path)
    work = written(tmp_path / "work", [SHOP, CART])
    for name, text in change.items():
        (work / name).write_text(text)
    task = tmp_path / "task.json"
    task.write_text(json.dumps({**FIX, "repository": "repository"}))
    ended = subprocess.run(
        [sys.executable, tmp_path / "verify.py"],
        cwd=work,
        env={"TASK_FILE": str(task)},
        capture_output=True,
        text=True,
    )
    assert (ended.returncode == 0) is done, ended


def test_held_out_repositories_are_in_no_other_task() -> None:
    tasks = {
        name: [json.loads(line) for line in (EXAMPLES / f"{name}.jsonl").read_text().splitlines()]
        for name in ("train", "heldout")
    }
    used = {name: {task["repository"] for task in each} for name, each in tasks.items()}
    assert not used["train"] & used["heldout"]
    kinds = {name: {task["kind"] for task in each} for name, each in tasks.items()}
    assert kinds["train"] == kinds["heldout"] == set(REQUESTS)
    texts = {
        name: {file.read_text() for folder in used[name] for file in (FOLDER / folder).glob("*.py")}
        for name in used
    }
    assert not texts["train"] & texts["heldout"]
    for each in (*tasks["train"], *tasks["heldout"]):
        folder = FOLDER / each["repository"]
        assert not is_done(folder, folder, each)
