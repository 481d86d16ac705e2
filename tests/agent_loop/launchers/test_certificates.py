"""What a company's machines tell programs of certificates and package indexes, as agents see it."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from agent_loop.launchers.command import CommandConfig, CommandLauncher
from agent_loop.processes.environment import CERTIFICATES, inherited_environment
from harbor_sdk.sandbox import SandboxError, require_privilege
from proxy.machine.direct_hosts import NAMES
from proxy.wall import Wall
from tests.agent_loop.conftest import MakeTrial
from tests.company_network import DEAD

READ = "import os; print(*(open(os.environ[n]).read() for n in {names}), os.environ['no_proxy'])"


def _no_strict() -> str | None:
    try:
        require_privilege()
    except SandboxError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    "show",
    [
        None,
        pytest.param(
            (sys.prefix, sys.base_prefix),
            marks=pytest.mark.skipif(_no_strict() is not None, reason=str(_no_strict())),
        ),
    ],
    ids=["open", "strict"],
)
async def test_agents_read_the_companys_certificates_and_reach_their_session(
    make_trial: MakeTrial,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    show: tuple[str, ...] | None,
) -> None:
    for name in CERTIFICATES:
        (tmp_path / f"{name}.pem").write_text(f"certificate of {name}")
        monkeypatch.setenv(name, str(tmp_path / f"{name}.pem"))
    monkeypatch.setenv("HTTP_PROXY", DEAD)
    for name in NAMES:  # which commands that ran in this process have extended
        monkeypatch.delenv(name, raising=False)
    wall = None if show is None else Wall(hide=(), show=show, strict=True)
    trial = replace(make_trial(), wall=wall, base_url="http://trainer.example.net:8000/t/v1")
    launcher = CommandLauncher(
        CommandConfig(argv=("{python}", "-c", READ.format(names=sorted(CERTIFICATES))))
    )
    await launcher.run(trial)
    await launcher.close()
    log = (trial.directory / "agent.log").read_text()
    assert all(f"certificate of {name}" in log for name in CERTIFICATES), log
    assert log.rstrip().endswith("localhost,127.0.0.1,::1,trainer.example.net")


def test_package_indexes_reach_agents_unless_they_hold_a_password(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("PIP_INDEX_URL", "UV_DEFAULT_INDEX", "npm_config_registry", "HF_ENDPOINT"):
        monkeypatch.setenv(name, "https://packages.corp/simple")
        assert inherited_environment()[name] == "https://packages.corp/simple"
        monkeypatch.setenv(name, "https://me:secret@packages.corp/simple")
        assert name not in inherited_environment()
