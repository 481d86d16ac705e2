"""How much memory a large dataset takes while it is read."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

MIB = 1 << 20
GROUPS, ROWS, ROW_BYTES = 64, 64, 128 << 10

READ = """
import resource, sys
from itertools import islice
from agent_loop.task_sources.dataset import DatasetTasksConfig

def peak_bytes():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

config = DatasetTasksConfig(path=sys.argv[1], shuffle_rows=64)
tasks = config.build("a", seed=0, shuffle=True).epoch(0)
assert len(list(islice(tasks, 64))) == 64
before = peak_bytes()
print(sum(1 for _ in tasks), peak_bytes() - before)
"""


@pytest.mark.long
@pytest.mark.parametrize("form", ["parquet", "jsonl"])
def test_reading_half_a_gibibyte_takes_little_more_memory_than_its_first_rows(
    tmp_path: Path, form: str
) -> None:
    if form == "parquet":
        with pq.ParquetWriter(tmp_path / "a.parquet", pa.schema([("text", pa.string())])) as file:
            for _ in range(GROUPS):
                texts = [os.urandom(ROW_BYTES // 2).hex() for _ in range(ROWS)]
                file.write_table(pa.table({"text": texts}))
    else:
        with (tmp_path / "a.jsonl").open("w") as file:
            for _ in range(GROUPS * ROWS):
                file.write(f'{{"text": "{os.urandom(ROW_BYTES // 2).hex()}"}}\n')
    command = [sys.executable, "-c", READ, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    rows, more_bytes = map(int, done.stdout.split())
    assert rows == (GROUPS - 1) * ROWS
    assert more_bytes < GROUPS * ROWS * ROW_BYTES / 4, f"{more_bytes / MIB:.0f} MiB"
