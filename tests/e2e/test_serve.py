"""`agentic-proxy serve --model PATH` without an engine starts its own engine, and ends it."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import openai
import pytest

pytestmark = pytest.mark.engine


def test_serve_starts_an_engine_records_and_leaves_nothing(
    tiny_model: Path, tmp_path: Path
) -> None:
    argv = [sys.executable, "-m", "proxy", "serve", "--model", str(tiny_model), "--port", "0"]
    argv += ["--auto-create", "--store", f"sqlite:///{tmp_path}/s.sqlite"]
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    with subprocess.Popen(
        argv, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        export = process.stdout.readline()
        base_url = export.split()[1].partition("=")[2]
        with openai.OpenAI(base_url=base_url, api_key="any") as client:
            answer = client.chat.completions.create(
                model="any", messages=[{"role": "user", "content": "hello"}], max_tokens=4
            )
        assert answer.usage is not None
        assert answer.usage.completion_tokens >= 1
        guards = [os.pidfd_open(pid) for pid in _children(process.pid)]
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 0
        assert guards
        assert all(select.select([fd], [], [], 0)[0] for fd in guards)


def _children(pid: int) -> list[int]:
    threads = Path(f"/proc/{pid}/task").iterdir()
    return [int(c) for thread in threads for c in (thread / "children").read_text().split()]
