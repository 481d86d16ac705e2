"""The swarm's server uses the configuration that the trainer resolved, and no other; without
`--config` it begins with the defaults."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from agent_loop.extras.swarm.serve import ServeOptions, serve
from agent_loop.extras.swarm.swarm import Swarm
from agent_loop.extras.swarm.table import EpisodeTable
from proxy.client import ProxyClient
from trainer.cli import main
from trainer.commands import runs as commands
from trainer.errors import ConfigError
from trainer.extras.swarm import swarm_hello
from trainer.settings.sources import load

EXAMPLE = Path(__file__).parents[3] / "examples/swarm/agentic_trainer.yaml"


@pytest.mark.parametrize(
    ("overrides", "environment", "groups"),
    [
        ([], {}, 4),
        (["rollout.groups_per_step=3"], {}, 3),
        ([], {"AGENTIC_TRAIN__ROLLOUT__GROUPS_PER_STEP": "5"}, 5),
    ],
)
async def test_server_uses_the_resolved_configuration(
    tmp_path: Path, overrides: list[str], environment: dict[str, str], groups: int
) -> None:
    config = load([EXAMPLE], overrides, environment)
    swarm = Swarm(EpisodeTable(tmp_path))
    await swarm.open()
    proxy = ProxyClient("http://127.0.0.1:1", "key")

    await swarm.hello(swarm_hello(config, proxy, tmp_path), proxy)

    plan = swarm.episodes.plan
    assert (plan.swarm, plan.rollout) == (config.swarm, config.rollout)
    assert plan.rollout.groups_per_step == groups
    assert (await swarm.status()).groups_wanted == groups
    await swarm.close()
    await proxy.close()


def test_former_key_of_the_swarm_section_is_refused_with_its_successor() -> None:
    with pytest.raises(ConfigError, match=r"set rollout\.groups_per_step=8"):
        load([EXAMPLE], ["swarm.groups=8"])


def _options(monkeypatch: pytest.MonkeyPatch, *argv: str) -> ServeOptions:
    """What the command line starts the server with."""
    served: list[ServeOptions] = []

    async def keep(options: ServeOptions, _: Callable[[str], None]) -> None:
        served.append(options)

    monkeypatch.setattr("agent_loop.extras.swarm.serve.serve", keep)
    monkeypatch.setattr(commands, "hide_memory", lambda: None)  # of the test's own process
    assert main(["--swarm-server", "127.0.0.1:0", *argv]) == 0
    return served[0]


def test_trainer_of_a_server_without_config_needs_only_the_model(
    monkeypatch: pytest.MonkeyPatch,
    tiny_model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = [f"model.path={tiny_model}", "rollout.group_size=4", "trainer.device=cpu"]
    options = _options(monkeypatch, *words, "--log-level", "error")
    config = tmp_path / "trainer.yaml"
    config.write_text(options.default_config)
    given = options.begin[options.begin.index("{config}") + 1 :]
    assert options.resume[-len(given) :] == given

    assert main(["--config", str(config), "--check", *given]) == 0

    resolved = yaml.safe_load(capsys.readouterr().out)
    assert resolved["swarm"]["stop_rule"] == "tasks"
    assert resolved["rollout"]["group_size"] == 4
    assert resolved["logging"]["log_level"] == "error"


def test_yaml_of_a_client_needs_no_swarm_section(
    monkeypatch: pytest.MonkeyPatch,
    tiny_model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = _options(monkeypatch)
    given = options.begin[options.begin.index("{config}") + 1 :]
    config = tmp_path / "trainer.yaml"
    for swarm in ({}, {"swarm": {"max_open": 3}}):
        config.write_text(yaml.safe_dump({"model": {"path": str(tiny_model)}, **swarm}))
        assert main(["--config", str(config), "--check", *given, "trainer.device=cpu"]) == 0
        resolved = yaml.safe_load(capsys.readouterr().out)
        assert resolved["swarm"]["max_open"] == (3 if swarm else 256)


def test_word_that_is_no_key_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--swarm-server", "127.0.0.1:0", "trainer.yaml"]) == 2
    assert "'trainer.yaml': expected key=value" in capsys.readouterr().err


async def test_default_configuration_is_written_once(tmp_path: Path) -> None:
    config = tmp_path / "trainer.yaml"
    for expected in ("swarm: {}", "of a client"):
        listening: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        options = ServeOptions("127.0.0.1:0", tmp_path, ["true"], default_config="swarm: {}")
        serving = asyncio.create_task(serve(options, listening.set_result))
        await listening
        assert config.read_text() == expected
        config.write_text("of a client")
        serving.cancel()
        await asyncio.wait([serving])
