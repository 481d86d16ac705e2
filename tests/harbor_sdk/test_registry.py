"""Downloads by a program in place of Harbor's."""

from __future__ import annotations

from pathlib import Path

from harbor_sdk.registry import download_dataset


def test_dataset_that_another_process_downloaded_meanwhile_is_used(tmp_path: Path) -> None:
    folder, program = tmp_path / "datasets", tmp_path / "harbor"
    program.write_text(  # "$6" is the folder for the download
        f'#!/bin/sh\nmkdir -p "$6/bench/task" "{folder}/bench/task"\n'
    )
    program.chmod(0o755)
    found = download_dataset("bench", folder, program=str(program))
    assert [path.name for path in found.iterdir()] == ["task"]
    assert list(folder.iterdir()) == [found]
