"""A launcher and a reward from outside the package are configured by the class of their section, as
`agent_loop.extras.kubernetes` and `agent_loop.extras.harbor` are."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from agent_loop.launchers.protocol import Launcher, LauncherConfig
from agent_loop.processes.host import PROCESS, ProcessConfig
from agent_loop.records import AgentEnd, AgentResult, FinishedTrial, Graded, Trial
from agent_loop.remote_agent_config import RemoteAgentConfig
from agent_loop.rewards.protocol import RewardConfig, RewardSource
from proxy.errors import ConfigurationError
from tests.agent_loop.conftest import MakeTrial
from tests.agent_loop.recorded import finished

HERE = "tests.agent_loop.test_outside_parts"


class EchoConfig(LauncherConfig):
    """A launcher whose agent ends at once."""

    says: str

    def build(self, process: ProcessConfig = PROCESS) -> Launcher:
        return EchoLauncher(self, process)


class EchoLauncher:
    overhead_s = 1.0

    def __init__(self, config: EchoConfig, process: ProcessConfig) -> None:
        self._config, self._process = config, process

    async def run(self, trial: Trial) -> AgentResult:
        said = f"{self._config.says} {trial.trial_id} for {self._process.grace_s} s"
        return AgentResult(AgentEnd.CRASHED, error=said)

    async def close(self) -> None:
        pass


class ConstantConfig(RewardConfig):
    """The same reward for every trial."""

    value: float = 0.5

    def build(self) -> RewardSource:
        return ConstantReward(self)


class ConstantReward:
    def __init__(self, config: ConstantConfig) -> None:
        self._config = config

    async def grade(self, finished: FinishedTrial) -> Graded:
        return Graded(self._config.value)

    async def close(self) -> None:
        pass


async def test_launcher_from_outside_runs_trials(make_trial: MakeTrial) -> None:
    launcher = {"target": f"{HERE}:EchoConfig", "settings": {"says": "hello"}}
    config = RemoteAgentConfig.model_validate({"launcher": launcher, "process": {"grace_s": 2}})
    assert config.agents == ["launcher"]
    result = await config.build_launcher().run(make_trial())
    assert result.error == "hello t-1 for 2.0 s"


async def test_reward_from_outside_is_summed_with_the_others(make_trial: MakeTrial) -> None:
    config = RemoteAgentConfig.model_validate(
        {
            "reward": {"target": f"{HERE}:ConstantConfig"},
            "verifier": {"argv": ["true"]},
            "reward_weights": {"reward": 4},
        }
    )
    trial = make_trial()
    trial.workspace.mkdir()
    rewards = config.build_rewards()
    assert await rewards.grade(finished(trial)) == Graded(3.0, {"reward": 0.5, "verifier": 1.0})
    await rewards.close()


@pytest.mark.parametrize(
    ("launcher", "expected"),
    [
        ({"target": "no_such_package:Config"}, "No module named 'no_such_package'"),
        ({"target": f"{HERE}:Missing"}, "no attribute 'Missing'"),
        ({"target": f"{HERE}:ConstantConfig"}, "not a subclass of LauncherConfig"),
        ({"target": f"{HERE}:EchoConfig"}, r"settings\.says: Field required"),
        (
            {"target": f"{HERE}:EchoConfig", "settings": {"says": "a", "louder": 1}},
            r"settings\.louder: Extra inputs",
        ),
    ],
)
def test_part_that_cannot_be_used_is_refused_by_name(
    launcher: dict[str, object], expected: str
) -> None:
    config = RemoteAgentConfig.model_validate({"launcher": launcher})
    with pytest.raises(ConfigurationError, match=expected):
        config.build_launcher()


@pytest.mark.parametrize(
    ("agent", "key"),
    [
        ({"http": {"url": "http://a/runs"}}, "pass_env"),
        ({"kubernetes": {"image": "agent:1"}}, "limits"),
        ({"harbor": {"agent_name": "codex", "server_url": "http://h:1"}}, "grace_s"),
    ],
)
def test_setting_of_a_process_without_an_effect_on_the_agent_is_refused(
    agent: dict[str, object], key: str
) -> None:
    process = {"pass_env": ["TOKEN"], "limits": {"cpu_s": 9}, "grace_s": 1, "log_bytes": 2048}
    with pytest.raises(
        ValidationError, match=rf"process\.{key}: an agent of `{next(iter(agent))}`"
    ):
        RemoteAgentConfig.model_validate({**agent, "process": {key: process[key]}})
    kept = RemoteAgentConfig.model_validate({**agent, "process": PROCESS.model_dump()})
    assert kept.process == PROCESS


def test_second_agent_in_addition_to_one_from_outside_is_refused() -> None:
    both = {"launcher": {"target": f"{HERE}:EchoConfig"}, "command": {"argv": ["true"]}}
    with pytest.raises(ValidationError, match=r"several agents: remote_agent\.command"):
        RemoteAgentConfig.model_validate(both)
