"""The swarm's server uses the configuration that the trainer resolved, and no other."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent_loop.swarm.swarm import Swarm
from agent_loop.swarm.table import EpisodeTable
from proxy.client import ProxyClient
from trainer.config_sources import load
from trainer.errors import ConfigError
from trainer.main_swarm import swarm_hello

EXAMPLE = Path(__file__).parents[2] / "examples/swarm/agentic_trainer.yaml"


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
