"""Memory for staged weights, on a machine and in a container."""

from __future__ import annotations

from pathlib import Path

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]  # vLLM's own


@pytest.mark.parametrize(
    ("limit", "expected"), [(None, 8 << 30), ("max", 8 << 30), (str(6 << 30), 3 << 30)]
)
def test_available_memory_is_that_of_the_container(
    tmp_path: Path, limit: str | None, expected: int
) -> None:
    from trainer.weight_sync.vllm_staging import available_bytes

    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text(f"MemTotal: 9 kB\nMemAvailable:  {8 << 20} kB\nX: 1\n")
    if limit is not None:
        group = tmp_path / "sys/fs/cgroup"
        group.mkdir(parents=True)
        (group / "memory.max").write_text(f"{limit}\n")
        (group / "memory.current").write_text(f"{4 << 30}\n")
        (group / "memory.stat").write_text(f"anon 1\ninactive_file {1 << 30}\n")
    assert available_bytes(tmp_path) == expected
