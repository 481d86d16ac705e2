"""Where a verifier's reward comes from, and what raises instead of giving a reward of 0."""

from __future__ import annotations

import sys

import pytest

from agent_loop.errors import RewardError
from agent_loop.records import Graded, Trial
from agent_loop.rewards.verifier import Verifier, VerifierConfig
from proxy.errors import ConfigurationError
from tests.agent_loop.conftest import MakeTrial
from tests.agent_loop.recorded import finished

WRITE = "import os; open(os.environ['REWARD_DIR'] + '/{}', 'w').write({!r})"


async def grade(trial: Trial, code: str, **settings: object) -> Graded:
    trial.workspace.mkdir()
    argv = (sys.executable, "-I", "-S", "-c", code)
    verifier = Verifier(VerifierConfig(argv=argv, **settings))
    try:
        return await verifier.grade(finished(trial))
    finally:
        await verifier.close()


@pytest.mark.parametrize(("code", "value"), [("pass", 1.0), ("raise SystemExit(1)", 0.0)])
async def test_exit_code_is_the_reward(make_trial: MakeTrial, code: str, value: float) -> None:
    assert await grade(make_trial(), code) == Graded(value)


async def test_reward_txt_takes_precedence_over_the_exit_code(make_trial: MakeTrial) -> None:
    code = WRITE.format("reward.txt", "0.25\n") + "; raise SystemExit(1)"
    assert await grade(make_trial(), code) == Graded(0.25)


async def test_reward_json_keeps_its_parts_and_the_configured_key_trains(
    make_trial: MakeTrial,
) -> None:
    code = WRITE.format("reward.json", '{"tests": 0.5, "style": true}')
    assert await grade(make_trial(), code, key="tests") == Graded(0.5, {"tests": 0.5, "style": 1})


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("reward.txt", "nan", "nan"),
        ("reward.json", "NaN", "nan"),
        ("reward.json", '{"reward": Infinity}', "inf"),
        ("reward.txt", "good", "'good' is not a number"),
        ("reward.json", "{", "not JSON"),
        ("reward.json", '{"score": 1}', "has no 'reward'"),
        ("reward.json", "[0.1, 0.2, 0.7]", "a list of 3 values; a reward is one number"),
        ("reward.json", '{"reward": [0, 1]}', "reward: a list of 2 values"),
        ("reward.json", '{"reward": "high"}', "'high' is not a number"),
    ],
)
async def test_unusable_reward_is_a_reward_error_with_the_reason(
    make_trial: MakeTrial, name: str, text: str, expected: str
) -> None:
    with pytest.raises(RewardError, match=expected):
        await grade(make_trial(), WRITE.format(name, text))


async def test_verifier_that_times_out_is_a_reward_error_instead_of_reward_0(
    make_trial: MakeTrial,
) -> None:
    with pytest.raises(RewardError, match="deadline"):
        await grade(make_trial(), "import time; time.sleep(600)", timeout_s=0.3)


async def test_killed_verifier_is_a_reward_error_instead_of_reward_0(make_trial: MakeTrial) -> None:
    with pytest.raises(RewardError, match="signal 9"):
        await grade(make_trial(), "import os; os.kill(os.getpid(), 9)")


CRASHES = {
    "missing module": ("import nosuchmodule", "No module named 'nosuchmodule'"),
    "exception after output": ("print('checking'); raise ValueError('a\\n\\nb')", "b"),
    "exception while handling": ("try: 1/0\nexcept Exception: raise KeyError('x')", "'x'"),
    "exception group": ("raise ExceptionGroup('several', [ValueError('x')])", "crashed"),
    "syntax error": ("if", "SyntaxError"),
    "exit code of the shell": ("raise SystemExit(127)", "exit code 127"),
    "exit code without a reward": ("raise SystemExit(2)", "exit code 2"),
    "hidden by a shell": (
        "import os, sys; os.execvp('sh', ['sh', '-c', sys.executable + ' -m nosuchmodule; true'])",
        "No module named nosuchmodule",
    ),
}


@pytest.mark.parametrize("name", CRASHES)
async def test_crashed_verifier_is_a_reward_error_with_the_last_line_of_standard_error(
    make_trial: MakeTrial, name: str
) -> None:
    code, expected = CRASHES[name]
    with pytest.raises(RewardError, match=expected):
        await grade(make_trial(), code)


async def test_crash_after_the_reward_file_was_written_is_a_reward_error(
    make_trial: MakeTrial,
) -> None:
    with pytest.raises(RewardError, match="ZeroDivisionError"):
        await grade(make_trial(), WRITE.format("reward.txt", "1") + "; 1/0")


async def test_failed_unit_tests_are_a_verdict_although_they_print_tracebacks(
    make_trial: MakeTrial,
) -> None:
    code = (
        "import unittest\n"
        "class Tests(unittest.TestCase):\n"
        "    def test_sum(self): self.assertEqual(1 + 1, 3)\n"
        "unittest.main()"
    )
    assert await grade(make_trial(), code) == Graded(0.0)


async def test_exit_codes_give_the_configured_rewards(make_trial: MakeTrial) -> None:
    codes = {0: 1.0, 1: 0.0, 3: 0.5}
    assert await grade(make_trial(), "raise SystemExit(3)", exit_codes=codes) == Graded(0.5)


async def test_missing_reward_file_that_was_configured_is_a_reward_error(
    make_trial: MakeTrial,
) -> None:
    with pytest.raises(RewardError, match=r"wrote no reward\.json"):
        await grade(make_trial(), WRITE.format("reward.txt", "1"), reward_file="reward.json")


async def test_standard_error_is_written_to_both_logs(make_trial: MakeTrial) -> None:
    trial = make_trial()
    await grade(trial, "import sys; print('out'); print('err', file=sys.stderr)")
    assert sorted((trial.directory / "verifier.log").read_text().split()) == ["err", "out"]
    assert (trial.directory / "verifier.stderr.log").read_text() == "err\n"


async def test_reward_file_that_the_agent_left_is_ignored(make_trial: MakeTrial) -> None:
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


def test_missing_verifier_is_refused_before_anything_starts() -> None:
    with pytest.raises(ConfigurationError, match="no-such-verifier"):
        Verifier(VerifierConfig(argv=("no-such-verifier",)))


@pytest.mark.parametrize(("pass_env", "reward"), [((), 0.0), (("REGION",), 1.0)])
async def test_only_passed_variables_reach_the_verifier(
    make_trial: MakeTrial, monkeypatch: pytest.MonkeyPatch, pass_env: tuple[str, ...], reward: float
) -> None:
    monkeypatch.setenv("REGION", "eu")
    code = "import os, sys; sys.exit('REGION' not in os.environ)"
    assert await grade(make_trial(), code, pass_env=pass_env) == Graded(reward)
