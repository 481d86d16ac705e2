"""Where a verifier's reward comes from, and what is a failure instead of a reward of 0."""

from __future__ import annotations

import sys

import pytest

from agent_loop.errors import RewardError
from agent_loop.launchers.protocol import Trial
from agent_loop.rewards.protocol import Graded
from agent_loop.rewards.verifier import Verifier, VerifierSettings
from proxy.errors import ConfigurationError
from tests.agent_loop.conftest import MakeTrial
from tests.agent_loop.recorded import finished

WRITE = "import os; open(os.environ['REWARD_DIR'] + '/{}', 'w').write({!r})"


async def grade(trial: Trial, code: str, **settings: object) -> Graded:
    trial.workspace.mkdir()
    argv = (sys.executable, "-I", "-S", "-c", code)
    verifier = Verifier(VerifierSettings(argv=argv, **settings))  # type: ignore[arg-type]
    try:
        return await verifier.grade(finished(trial))
    finally:
        await verifier.close()


@pytest.mark.parametrize(("code", "value"), [("pass", 1.0), ("raise SystemExit(1)", 0.0)])
async def test_exit_code_is_the_reward(make_trial: MakeTrial, code: str, value: float) -> None:
    assert await grade(make_trial(), code) == Graded(value)


async def test_reward_text_stands_over_the_exit_code(make_trial: MakeTrial) -> None:
    code = WRITE.format("reward.txt", "0.25\n") + "; raise SystemExit(1)"
    assert await grade(make_trial(), code) == Graded(0.25)


async def test_reward_json_keeps_its_parts_and_the_configured_key_trains(
    make_trial: MakeTrial,
) -> None:
    code = WRITE.format("reward.json", '{"tests": 0.5, "style": true}')
    assert await grade(make_trial(), code, key="tests") == Graded(0.5, {"tests": 0.5, "style": 1})


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("reward.txt", "nan", "nan"),
        ("reward.json", "NaN", "nan"),
        ("reward.json", '{"reward": Infinity}', "inf"),
        ("reward.txt", "good", "'good' is not a number"),
        ("reward.json", "{", "not JSON"),
        ("reward.json", '{"score": 1}', "no 'reward' in it"),
        ("reward.json", '{"reward": "high"}', "'high' is not a number"),
    ],
)
async def test_unusable_reward_is_a_failure_that_says_so(
    make_trial: MakeTrial, name: str, text: str, told: str
) -> None:
    with pytest.raises(RewardError, match=told):
        await grade(make_trial(), WRITE.format(name, text))


async def test_verifier_out_of_time_is_a_failure_and_not_zero(make_trial: MakeTrial) -> None:
    with pytest.raises(RewardError, match="deadline"):
        await grade(make_trial(), "import time; time.sleep(600)", timeout_s=0.3)


async def test_killed_verifier_is_a_failure_and_not_zero(make_trial: MakeTrial) -> None:
    with pytest.raises(RewardError, match="signal 9"):
        await grade(make_trial(), "import os; os.kill(os.getpid(), 9)")


async def test_file_that_the_agent_left_is_not_its_reward(make_trial: MakeTrial) -> None:
    trial = make_trial()
    (trial.directory / "reward.txt").write_text("1.0")
    assert await grade(trial, "raise SystemExit(1)") == Graded(0.0)


async def test_verifier_sees_the_task_and_the_workspace(make_trial: MakeTrial) -> None:
    trial = make_trial(answer="42")
    trial.task_file.write_text('{"answer": "42"}')
    code = (
        "import json, os; task = json.load(open(os.environ['TASK_FILE']));"
        f"assert task['answer'] == '42' and os.getcwd() == {str(trial.workspace)!r};"
        "assert 'OPENAI_API_KEY' not in os.environ"
    )
    assert await grade(trial, code) == Graded(1.0)


def test_verifier_that_does_not_exist_is_told_before_anything_starts() -> None:
    with pytest.raises(ConfigurationError, match="no-such-verifier"):
        Verifier(VerifierSettings(argv=("no-such-verifier",)))
