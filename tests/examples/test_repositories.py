"""Tasks of the example repositories: what is done, what is not, and what agents may not do."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from examples.claude_code import expert as claude_code
from examples.repositories.tasks import FOLDER, REQUESTS, File, is_done, new_repository, new_task
from examples.starter_model.transcripts import Transcript

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
                file = folder / given["file_path"]
                text = file.read_text()
                assert text.count(given["old_string"]) == 1
                file.write_text(text.replace(given["old_string"], given["new_string"]))
            elif call["function"]["name"] == "Bash":
                subprocess.run(given["command"], shell=True, cwd=folder, check=True)


@pytest.mark.parametrize("kind", REQUESTS)
def test_expert_does_each_kind_of_task_and_not_always(kind: str, tmp_path: Path) -> None:
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
        played = claude_code.played(repository, task, claude_code.date(2026, 1, 1), rng)
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
