"""`benchmarks.train` with a contestant that ends: a row that says why, and the others go on."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import IO, Any

import pytest

from benchmarks.endings import reason
from benchmarks.train import __main__ as bench

STEP = '{"wall": 2.0, "cpu": 2.0, "tokens": 100.0, "peak_mb": 5.0, "grad_norm": 1.5}'
GOES_ON = f"import sys\nfor _ in sys.stdin: print('{STEP}', flush=True)"
ENDS = {
    "at once": "raise SystemExit('no such kernel')",
    "at a step": f"import sys; input(); print('{STEP}', flush=True); input(); raise MemoryError",
    "killed": "import os, signal; input(); os.kill(os.getpid(), signal.SIGKILL)",
}
WHY = {
    "at once": "exit status 1: no such kernel",
    "at a step": "out of memory: MemoryError",
    "killed": "ended by SIGKILL, as if the machine's memory ran out",
}


@pytest.mark.parametrize("how", ENDS)
@pytest.mark.parametrize("ending", ["packed", "trl"])
def test_contestant_that_ends_is_a_row_and_the_others_go_on(
    how: str, ending: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def start(name: str, _workload: str, _folder: str, errors: IO[str]) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", ENDS[how] if name == ending else GOES_ON],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )

    monkeypatch.setattr(bench, "_start", start)
    monkeypatch.setattr(bench, "save_model", lambda *_: None)
    monkeypatch.setattr(sys, "argv", ["train", "--workloads", "tools", "--steps", "2"])
    assert bench.main() == 1
    header, _, *rows = capsys.readouterr().out.splitlines()
    assert {row.count("|") for row in rows} == {header.count("|")}
    cells = {row.split(" | ")[1]: row.split(" | ")[2:] for row in rows}
    assert list(cells) == ["pieces", "tree", "packed", "trl"]
    assert cells.pop(ending)[0] == f"failed: {WHY[how]}"
    over = "" if ending == "trl" else "1.0x"
    for row in cells.values():
        assert [each.strip(" |") for each in row] == [
            *("2.00", "2.00", "50", over, over, "5", "1.500000")
        ]


@pytest.fixture
def handler() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures("handler")
def test_stopped_it_shows_what_was_measured_and_leaves_no_contestant(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the third round, the second contestant stops the benchmark and goes on waiting."""
    two = f"import sys\nfor _ in range(2): input(); print('{STEP}', flush=True)\ninput()\n"
    stops = f"{two}import os, signal; os.kill(os.getppid(), signal.SIGTERM); signal.pause()"
    codes = {"tree": stops}
    started: list[subprocess.Popen[str]] = []

    def start(name: str, _workload: str, _folder: str, errors: IO[str]) -> subprocess.Popen[str]:
        code = codes.get(name, GOES_ON)
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        started.append(
            subprocess.Popen([sys.executable, "-c", code], stderr=errors, text=True, **pipes)
        )
        return started[-1]

    monkeypatch.setattr(bench, "_start", start)
    monkeypatch.setattr(bench, "save_model", lambda *_: None)
    words = ["train", "--workloads", "tools", "single-turn", "--steps", "9", "--contestants"]
    monkeypatch.setattr(sys, "argv", [*words, "pieces", "tree"])
    assert bench.main() == 128 + signal.SIGTERM
    rows = capsys.readouterr().out.splitlines()[2:]
    cells = [row.split(" | ")[1:3] for row in rows]
    assert cells == [["pieces", "2.00"], ["tree", "2.00"]]
    assert [each.returncode for each in started] == [-signal.SIGKILL] * 2


def test_reason_names_signals_memory_and_the_last_line() -> None:
    assert reason(-9, "x").startswith("ended by SIGKILL")
    assert reason(137, "x").startswith("ended by SIGKILL")
    assert reason(143, "") == "ended by SIGTERM"
    assert reason(1, "") == "exit status 1: it printed nothing"
    assert reason(2, "ValueError: a | b\n| a | table |\n") == "exit status 2: ValueError: a / b"
    line = "torch.OutOfMemoryError: CUDA out of memory."
    assert reason(1, f"{line}\nRuntimeError: engine ended") == f"out of memory: {line}"
