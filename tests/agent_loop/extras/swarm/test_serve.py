"""What a swarm server cannot use is refused in one line, before it listens."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent_loop.extras.swarm.serve import ServeOptions, serve
from proxy.errors import ConfigurationError


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.1:", "127.0.0.1:65536", "127.0.0.1:-1"])
async def test_address_without_a_possible_port_is_refused(address: str, tmp_path: Path) -> None:
    await _refused(ServeOptions(address, tmp_path, ["true"]), f"--swarm-server '{address}': give")


async def test_state_folder_that_is_a_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    for folder in (file, file / "below"):
        options = ServeOptions("127.0.0.1:0", folder, ["true"])
        await _refused(options, f"--state-dir {folder}: cannot be used")


async def test_configuration_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    for config in (tmp_path / "nope.yaml", tmp_path):
        options = ServeOptions("127.0.0.1:0", tmp_path / "state", ["true"], config=config)
        await _refused(options, f"--config {config}: cannot be read")


async def _refused(options: ServeOptions, says: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        await serve(options, pytest.fail)
    assert says in refused.value.message
