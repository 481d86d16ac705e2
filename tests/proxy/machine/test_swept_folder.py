"""Folders of killed processes are removed; those of living ones are not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from multiprocessing import shared_memory
from pathlib import Path

import pytest

from proxy.machine.swept_folder import SHARED_MEMORY, swept_folder

HOLDS = """
import sys, time
from multiprocessing import shared_memory
from pathlib import Path
from proxy.machine.swept_folder import swept_folder
from trainer.weight_sync.vllm_plugin import name_shared_memory
with swept_folder("swept-", Path(sys.argv[1])) as folder:
    name_shared_memory(folder)
    memory = shared_memory.SharedMemory(create=True, size=64)
    print(folder, memory.name, flush=True)
    time.sleep(600)
"""


def test_folder_of_a_killed_process_is_removed_at_the_next_start_and_a_held_one_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "swept-foreign").mkdir()
    foreign = shared_memory.SharedMemory(create=True, size=64)
    with subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as other:
        assert other.stdout is not None
        folder, memory = other.stdout.readline().split()
        left, memory_file = Path(folder), SHARED_MEMORY / memory
        (left / "0.sock").touch()
        with swept_folder("swept-") as mine:
            assert left.is_dir()
        os.killpg(other.pid, signal.SIGKILL)  # with Python's process that tracks its memory
        other.wait()
        assert left.is_dir()
        assert memory_file.is_file()
    with swept_folder("swept-", tmp_path) as mine:
        assert not left.exists()
        assert not memory_file.exists()
        assert mine.is_dir()
    foreign.close()
    foreign.unlink()  # was not swept
    assert [path.name for path in tmp_path.iterdir()] == ["swept-foreign"]
