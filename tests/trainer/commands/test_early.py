"""Which engines start before the configuration is checked."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from proxy.engines import vllm_early, vllm_platform
from trainer import cli
from trainer.commands.early import engines_to_start, sources_of
from trainer.run.folder import RunFolder
from trainer.settings import values as values_of_sources


def file(folder: Path, values: Any) -> Path:
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


@pytest.mark.parametrize(
    ("values", "words", "environment", "replicas"),
    [
        ({}, [], {}, 1),
        ({"engine": {"replicas": 3}}, [], {}, 3),
        ({"engine": {"replicas": 3}}, ["engine.replicas=2"], {}, 2),
        ({}, [], {"AGENTIC_TRAIN__ENGINE__REPLICAS": "4"}, 4),
        ({"engine": {"replicas": 9}}, [], {}, 0),
        ({"engine": {"replicas": "many"}}, [], {}, 0),
        ({"engine": {"urls": ["http://there"]}}, [], {}, 0),
        ({"cluster": {"backend": "ray"}}, [], {}, 0),
        ({"sft": {}}, [], {}, 0),
        ({}, [], {"RANK": "0"}, 1),
        ({}, [], {"RANK": "1"}, 0),
        ({"engine": "wrong"}, [], {}, 0),
        ({"engine": None}, [], {}, 1),
        (["wrong"], [], {}, 0),
        ({"engine": {"env": ["wrong"]}}, [], {}, 0),
        ({"engine": {"env": {"NUMBER": 1}}}, [], {}, 0),
        ({}, ["report", "runs/a"], {}, 0),
        ({}, ["engine"], {}, 0),
    ],
)
def test_engines_start_early_only_if_the_run_starts_them_here(
    tmp_path: Path,
    values: Any,
    words: list[str],
    environment: Mapping[str, str],
    replicas: int,
) -> None:
    assert engines_to_start(sources_of([file(tmp_path, values)], words, environment))[0] == replicas


def test_early_engines_have_the_variables_of_the_configuration(tmp_path: Path) -> None:
    config = file(tmp_path, {"engine": {"env": {"VLLM_LOGGING_LEVEL": "DEBUG"}}})
    assert engines_to_start(sources_of([config], [], {})) == (1, {"VLLM_LOGGING_LEVEL": "DEBUG"})


def test_run_that_continues_starts_the_engines_of_its_own_configuration(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run")
    folder.config.write_text(yaml.safe_dump({"engine": {"replicas": 2}}))
    words = ["resume", str(folder.path)]
    assert engines_to_start(sources_of([], words, {})) == (2, {})
    assert engines_to_start(sources_of([], [*words, "engine.replicas=3"], {})) == (3, {})
    nowhere = sources_of([], ["resume", str(tmp_path / "none")], {})
    assert engines_to_start(nowhere) == (0, {})


@pytest.mark.parametrize("resumes", [False, True])
def test_command_reads_its_configuration_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resumes: bool
) -> None:
    folder = RunFolder.create(tmp_path / "run")
    folder.config.write_text(yaml.safe_dump({"model": {"path": "m"}, "engine": {"urls": ["x"]}}))
    read: list[Path] = []

    def read_yaml(path: Path) -> Any:
        read.append(path)
        return yaml.safe_load(path.read_text())

    monkeypatch.setattr(values_of_sources, "read_yaml", read_yaml)
    words = ["resume", str(folder.path)] if resumes else ["--config", str(folder.config)]
    assert cli.main([*words, "trainer.steps=0"]) == 2
    assert read == [folder.config]


@pytest.mark.parametrize("platform", [vllm_platform.CPU, vllm_platform.GPU])
def test_command_that_fails_leaves_no_early_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, platform: vllm_platform.EnginePlatform
) -> None:
    begun: list[int] = []

    def begin(count: int, *_: Any) -> None:
        begun.append(count)
        vllm_early._waiting.append(Waiting())

    class Waiting(vllm_early.EarlyServer):
        def __init__(self) -> None: ...

        def end(self) -> None:
            begun.remove(1)

    monkeypatch.setattr(vllm_early, "begin", begin)
    monkeypatch.setattr(vllm_platform, "installed", lambda: platform)
    config = file(tmp_path, {"no_such_section": {}})
    assert cli.main(["--config", str(config), "--check"]) == 2
    assert cli.main(["--config", str(config)]) == 2
    assert begun == []
    assert vllm_early.taken({}) is None
