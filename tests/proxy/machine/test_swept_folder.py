"""Folders of killed processes are removed; those of living ones are not."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from proxy.machine.swept_folder import swept_folder

HOLDS = """
import sys, time
from proxy.machine.swept_folder import swept_folder
with swept_folder("swept-") as folder:
    print(folder, flush=True)
    time.sleep(600)
"""


def test_folder_of_a_killed_process_is_removed_at_the_next_start_and_a_held_one_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "swept-foreign").mkdir()
    with subprocess.Popen(
        [sys.executable, "-c", HOLDS], stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        left = Path(other.stdout.readline().strip())
        (left / "0.sock").touch()
        with swept_folder("swept-") as mine:
            assert left.is_dir()
        other.send_signal(signal.SIGKILL)
        other.wait()
        assert left.is_dir()
    with swept_folder("swept-") as mine:
        assert not left.exists()
        assert mine.is_dir()
    assert [path.name for path in tmp_path.iterdir()] == ["swept-foreign"]
