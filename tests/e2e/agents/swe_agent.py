"""`make test-swe-agent`: SWE-agent, from a checkout of its repository, unmodified.

`make test` does not run it, because it is not published as a package.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from examples.swe_agent.expert import played
from proxy.records import SessionKind
from tests.e2e.agents.test_agents import AGENTS, Agent, assert_exact, example, proxy, trial
from tests.e2e.agents.test_repositories import ROOT, assert_recorded_as_written
from tests.proxy.conftest import RunningProxy

__all__ = ["proxy"]


@pytest.mark.parametrize(
    ("kind", "temperature"), [(SessionKind.TRAIN, 1.0), (SessionKind.EVAL, 0.0)], ids=str
)
async def test_its_temperature_of_0_reaches_the_sampler_in_evaluation_alone(
    kind: SessionKind, temperature: float, proxy: RunningProxy, tmp_path: Path
) -> None:
    programs = AGENTS / "swe-agent/bin"
    rollout = await trial(proxy, example("swe_agent"), tmp_path, kind=kind, programs=programs)
    if kind is SessionKind.TRAIN:
        assert_exact(rollout, Agent("swe_agent"), proxy)
    else:
        assert (rollout.reward, rollout.sampled_tokens) == (1.0, 0)
    _, turns = await proxy.control.get_turns(rollout.trial_id)
    assert {turn.sampling["temperature"] for turn in turns} == {temperature}
    assert {call.sampling["temperature"] for call in proxy.engine.calls} == {temperature}


async def test_recorded_tokens_are_those_of_the_transcript(tmp_path: Path) -> None:
    tokens = ROOT / "examples/swe_agent/model"
    await assert_recorded_as_written("swe_agent", played, tokens, tmp_path)
