"""The quickstart's agent and verifier are separate programs that know only their environment."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from examples.quickstart.shop import calculate, price, right_answer

FOLDER = Path(__file__).parents[2] / "examples" / "quickstart"
TASK = {
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
    with _server(calls) as (url, seen):
        done = _run("agent.py", tmp_path, OPENAI_BASE_URL=url)
    assert done.returncode == 0, done.stderr
    results = [m["content"] for m in seen[-1]["messages"] if m["role"] == "tool"]
    assert results == [price(TASK["prices"], "pens"), price(TASK["prices"], "hats"), "total: 96"]
    assert _run("verify.py", tmp_path).returncode == 0


def test_agent_survives_calls_that_make_no_sense(tmp_path: Path) -> None:
    calls = [_call("fly", {}), _call("price", {"thing": 1}), {"content": "7"}]
    with _server(calls) as (url, seen):
        assert _run("agent.py", tmp_path, OPENAI_BASE_URL=url).returncode == 0
    results = [m["content"] for m in seen[-1]["messages"] if m["role"] == "tool"]
    assert all(result.startswith("error") for result in results)
    assert _run("verify.py", tmp_path).returncode == 1


def test_no_answer_is_a_verdict_not_a_crash(tmp_path: Path) -> None:
    with _server([_call("price", {"item": "pens"})] * 20) as (url, seen):
        assert _run("agent.py", tmp_path, OPENAI_BASE_URL=url).returncode == 0
    assert len(seen) < 10
    done = _run("verify.py", tmp_path)
    assert (done.returncode, done.stdout) == (1, "the agent gave no answer\n")


def _run(script: str, folder: Path, **env: str) -> subprocess.CompletedProcess[str]:
    task_file = folder / "task.json"
    task_file.write_text(json.dumps(TASK))
    told = {
        "PATH": os.environ["PATH"],
        "OPENAI_API_KEY": "key",
        "AGENT_MODEL": "policy",
        "TASK_FILE": str(task_file),
        **env,
    }
    return subprocess.run(
        [sys.executable, str(FOLDER / script)],
        cwd=folder,
        env=told,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def _call(name: str, arguments: dict) -> dict:
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"content": None, "tool_calls": [{"id": "c", "type": "function", "function": function}]}


@contextmanager
def _server(answers: list[dict]) -> Iterator[tuple[str, list[dict]]]:
    """An OpenAI-compatible server that says `answers` one after the other; what it was asked."""
    seen: list[dict] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            message = {"role": "assistant", **answers[len(seen)]}
            seen.append(body)
            choice = {"index": 0, "finish_reason": "stop", "message": message}
            answer = {"id": "1", "object": "chat.completion", "created": 0, "model": "policy"}
            raw = json.dumps({**answer, "choices": [choice]}).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1", seen
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
