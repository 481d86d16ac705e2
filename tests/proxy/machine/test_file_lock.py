"""One process at a time writes a file that each would name alike."""

from __future__ import annotations

import os
from pathlib import Path

from proxy.machine.file_lock import free_path


def test_file_that_another_holds_gets_another_name_until_it_is_free(tmp_path: Path) -> None:
    wanted = tmp_path / "vllm.log"
    with free_path(wanted) as first, free_path(wanted) as second:
        assert first == wanted
        assert second == tmp_path / f"vllm-{os.getpid()}.log"
    with free_path(wanted) as third:
        assert third == wanted
