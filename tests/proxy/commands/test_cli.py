"""The commands' options, messages and import time, those of every extra, too."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import get_args

import pytest

from proxy.cli import main
from proxy.commands import arguments
from proxy.records import SessionKind, SessionStatus
from proxy.settings.state_folder import default_store
from tests.postgres_server import empty_database

SLOW = ("aiohttp", "torch", "renderers", "pydantic", "numpy", "tokenizers", "uvloop", "websockets")
"""Modules that take 0.1 s or more to import."""
HELP = """
import sys
from {module} import main
try:
    main({argv})
except SystemExit as ended:
    assert not ended.code, ended.code
print([name for name in {slow} if name in sys.modules], file=sys.stderr)
"""


@pytest.mark.parametrize(
    ("module", "argv"),
    [
        ("proxy.cli", ["--help"]),
        ("proxy.cli", ["--version"]),
        ("proxy.cli", ["serve", "--help"]),
        ("proxy.cli", ["sessions", "--help"]),
        ("proxy.cli", ["sessions", "list", "--help"]),
        ("proxy.cli", ["sessions", "show", "--help"]),
        ("proxy.cli", ["export", "--help"]),
        ("proxy.cli", ["replay", "--help"]),
        ("proxy.extras.relay.cli", ["--help"]),
        ("proxy.extras.relay.cli", ["--version"]),
    ],
)
def test_help_imports_no_slow_module(module: str, argv: list[str]) -> None:
    program = HELP.format(module=module, argv=argv, slow=SLOW)
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout
    assert done.stderr.strip() == "[]"


def test_version_flag_prints_the_installed_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert not ended.value.code
    assert capsys.readouterr().out == f"agentic-proxy {metadata.version('agentic-rl')}\n"


def test_choices_of_flags_equal_the_values_of_the_enums() -> None:
    assert set(get_args(arguments.Status)) == set(SessionStatus)
    assert set(get_args(arguments.Kind)) == set(SessionKind)


@pytest.mark.parametrize(
    "command", [["sessions", "list"], ["sessions", "show", "x"], ["export", "--out", "x.jsonl"]]
)
def test_command_without_a_store_is_refused_and_creates_nothing(
    command: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(command) == 2
    error = capsys.readouterr().err
    assert f"the file {default_store()} does not exist" in error
    assert not default_store().parent.exists()
    assert "--store sqlite:///FILE" in error
    assert list(tmp_path.iterdir()) == []


async def test_command_creates_no_tables_in_an_empty_postgresql_database(
    postgres: str, capsys: pytest.CaptureFixture[str]
) -> None:
    import asyncio

    import asyncpg

    url = await empty_database(postgres)
    assert await asyncio.to_thread(main, ["sessions", "list", "--store", url]) == 2
    assert "is not a store of the proxy" in capsys.readouterr().err
    connection = await asyncpg.connect(url)
    tables = "SELECT count(*) FROM pg_tables WHERE schemaname = 'public'"
    assert await connection.fetchval(tables) == 0
    await connection.close()


def test_worker_has_a_flag_for_every_setting_except_secrets() -> None:
    from proxy.extras.relay.cli import FLAGS
    from proxy.extras.relay.worker_config import WorkerConfig
    from proxy.extras.relay.worker_process import SECRETS

    flags = {flag.replace("-", "_") for flag in FLAGS}
    assert flags == set(WorkerConfig.model_fields) - SECRETS
