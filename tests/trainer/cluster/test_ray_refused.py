"""Ray that is missing or not as configured is refused at once, in one line."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from tests.needs import skip_or_fail
from tests.trainer.test_fit import config_of
from trainer.cluster.registry import open_cluster
from trainer.config import TrainerConfig
from trainer.errors import ConfigError
from trainer.run.control import RunControl
from trainer.run.folder import RunFolder

try:
    import ray
except ImportError:
    skip_or_fail("ray is not installed: pip install ray", at_import=True)


def config(model: Path, **cluster: object) -> TrainerConfig:
    return config_of(model, cluster={"backend": "ray"} | cluster)


def open_once(settings: TrainerConfig, tmp_path: Path) -> None:
    async def connect() -> None:
        folder = RunFolder.create(tmp_path / "run")
        async with open_cluster(settings, folder, RunControl()):
            raise AssertionError("it opened")

    asyncio.run(connect())


def test_missing_ray_is_refused_with_the_package_to_install(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.startswith("trainer.extras.ray")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"cluster\.backend=ray: .*pip install ray"):
        open_once(config(checkpoint), tmp_path)


def test_address_where_nothing_listens_is_refused_at_once(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cluster\.address='127\.0\.0\.1:1': no Ray .*refused"):
        open_once(config(checkpoint, address="127.0.0.1:1"), tmp_path)


def test_missing_cluster_is_refused_with_the_command_that_starts_one(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    # Ray looks at all processes of the machine, and another worker of pytest may run a cluster.
    monkeypatch.setattr("ray._private.services._find_address_from_flag", lambda _: set())
    with pytest.raises(ConfigError, match=r"cluster\.address='auto': no Ray .*ray start --head"):
        open_once(config(checkpoint, address="auto"), tmp_path)


def test_ray_that_does_not_start_is_an_error_in_one_line(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match=r"cluster\.backend=ray: Ray does not start here \("):
        open_once(config(checkpoint), tmp_path)
    assert not ray.is_initialized()
