"""One recorded run for all tests of the ledger."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.trainer.extras.ledger.recorded_run import Recorded, made


@pytest.fixture(scope="package")
def run(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    return made(tiny_model, tmp_path_factory.mktemp("runs") / "run")


@pytest.fixture
def copy(run: Recorded, tmp_path: Path) -> Path:
    """A copy of the run, to be changed."""
    return Path(shutil.copytree(run.folder.path, tmp_path / "run"))
