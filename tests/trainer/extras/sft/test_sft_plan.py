"""A run of fine-tuning keeps no GPU for engines, which it does not start."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import yaml

from tests.trainer.extras.sft.recorded import write_sessions
from trainer import start
from trainer.cluster.device_plan import Gpu
from trainer.extras.sft import main as main_sft
from trainer.settings.values import Sources

SMALL = Gpu("made-up", 2 * 2**30)
"""Has room for a rank of the tiny model, and not for an engine beside it."""


def check(tiny_model: Path, folder: Path, **sections: object) -> str:
    asyncio.run(write_sessions(folder / "sessions.db", tiny_model, 9))
    settings = {
        "model": {"path": str(tiny_model)},
        "sft": {"sessions": [str(folder / "sessions.db")]},
        **sections,
    }
    (folder / "sft.yaml").write_text(yaml.safe_dump(settings))
    return start.check_only(Sources([folder / "sft.yaml"], [], {}))


def test_plan_of_gpus_has_no_engine(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (main_sft, start):
        monkeypatch.setattr(module, "gpus_here", lambda: (SMALL,))
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    (line,) = [each for each in check(tiny_model, tmp_path).splitlines() if each.startswith("# ")]
    assert line.startswith("# GPU 0 (made-up, 2.0 GiB): rank 0, ")
    assert "engine" not in line


def test_keys_of_engines_on_gpus_have_no_effect_on_a_cpu(tiny_model: Path, tmp_path: Path) -> None:
    engine = {"sleep": True, "weight_transfer": "nccl"}
    printed = check(tiny_model, tmp_path, engine=engine, trainer={"device": "cpu"})
    assert yaml.safe_load(printed)["engine"]["weight_transfer"] == "nccl"
