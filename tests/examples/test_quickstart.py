"""The quickstart's agent and verifier are separate programs that read only their environment."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from examples.quickstart.shop import calculate, price, right_answer
from tests.examples.openai_server import openai_server

FOLDER = Path(__file__).parents[2] / "examples" / "quickstart"
TASK: dict[str, Any] = {
    "prompt": "What does this order cost?\npens: 3\nhats: 2",
    "order": {"pens": 3, "hats": 2},
    "prices": {"pens": 14, "hats": 27},
}


@pytest.mark.parametrize(
    ("expression", "value"),
    [("3*14+2*27", 96), ("5", 5), ("2 * 3", 6), ("1+2*3", 7)],
)
def test_calculator_adds_products(expression: str, value: int) -> None:
    assert calculate(expression) == f"total: {value}"


@pytest.mark.parametrize("expression", ["", "3*", "__import__('os')", "9**9", "1-1", "2*3*4"])
def test_calculator_refuses_anything_else(expression: str) -> None:
    assert calculate(expression).startswith("error")


def test_tasks_are_checkable_and_held_out_tasks_are_not_trained_on() -> None:
    files = {
        name: [json.loads(line) for line in (FOLDER / f"{name}.jsonl").read_text().splitlines()]
        for name in ("train", "heldout")
    }
    prompts = {name: {task["prompt"] for task in tasks} for name, tasks in files.items()}
    assert not prompts["train"] & prompts["heldout"]
    for task in files["train"] + files["heldout"]:
        terms = [f"{n}*{task['prices'][thing]}" for thing, n in task["order"].items()]
        assert calculate("+".join(terms)) == right_answer(task["order"], task["prices"])


def test_agent_uses_its_tools_and_leaves_the_answer(tmp_path: Path) -> None:
    calls = [
        _call("price", {"item": "pens"}),
        _call("price", {"item": "hats"}),
        _call("calculate", {"expression": "3*14+2*27"}),
        {"content": "total: 96"},
    ]
    with openai_server(calls) as (url, seen):
        done = _run("agent.py", tmp_path, OPENAI_BASE_URL=url)
    assert done.returncode == 0, done.stderr
    results = [m["content"] for m in seen[-1]["messages"] if m["role"] == "tool"]
    assert results == [price(TASK["prices"], "pens"), price(TASK["prices"], "hats"), "total: 96"]
    assert _run("verify.py", tmp_path).returncode == 0


def test_agent_survives_invalid_calls(tmp_path: Path) -> None:
    calls = [_call("fly", {}), _call("price", {"thing": 1}), {"content": "7"}]
    with openai_server(calls) as (url, seen):
        assert _run("agent.py", tmp_path, OPENAI_BASE_URL=url).returncode == 0
    results = [m["content"] for m in seen[-1]["messages"] if m["role"] == "tool"]
    assert all(result.startswith("error") for result in results)
    assert _run("verify.py", tmp_path).returncode == 1


def test_missing_answer_fails_verification_without_a_crash(tmp_path: Path) -> None:
    with openai_server([_call("price", {"item": "pens"})] * 20) as (url, seen):
        assert _run("agent.py", tmp_path, OPENAI_BASE_URL=url).returncode == 0
    assert len(seen) < 10
    done = _run("verify.py", tmp_path)
    assert (done.returncode, done.stdout) == (1, "the agent gave no answer\n")


def _run(script: str, folder: Path, **env: str) -> subprocess.CompletedProcess[str]:
    task_file = folder / "task.json"
    task_file.write_text(json.dumps(TASK))
    variables = {
        "PATH": os.environ["PATH"],
        "OPENAI_API_KEY": "key",
        "AGENT_MODEL": "policy",
        "TASK_FILE": str(task_file),
        **env,
    }
    return subprocess.run(
        [sys.executable, str(FOLDER / script)],
        cwd=folder,
        env=variables,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def _call(name: str, arguments: dict) -> dict:
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"content": None, "tool_calls": [{"id": "c", "type": "function", "function": function}]}
