"""The Python grader: its value, and its failures that are not zeros."""

from __future__ import annotations

import pytest

from agent_loop.errors import RewardError
from agent_loop.launchers.protocol import Trial
from agent_loop.rewards.grader import Grader, GraderSettings
from agent_loop.rewards.protocol import Graded
from tests.agent_loop.conftest import MakeTrial
from tests.agent_loop.recorded import finished


async def grade(trial: Trial, function: str, answer: str = "42", timeout_s: float = 20) -> Graded:
    trial.workspace.mkdir()
    target = f"tests.agent_loop.functions:{function}"
    grader = Grader(GraderSettings(target=target, timeout_s=timeout_s))
    try:
        return await grader.grade(finished(trial, answers=[answer]))
    finally:
        await grader.close()


@pytest.mark.parametrize(("answer", "value"), [("42", 1.0), ("41", 0.0)])
async def test_function_judges_the_models_answers(
    make_trial: MakeTrial, answer: str, value: float
) -> None:
    assert await grade(make_trial(answer="42"), "exact_answer", answer) == Graded(value)


async def test_none_is_no_reward(make_trial: MakeTrial) -> None:
    assert await grade(make_trial(), "has_no_opinion") == Graded(None)


async def test_exception_is_a_failure_and_not_zero(make_trial: MakeTrial) -> None:
    trial = make_trial()
    with pytest.raises(RewardError, match=r"exit code 1; see .*grader\.log"):
        await grade(trial, "raises")
    assert "grader is broken" in (trial.directory / "grader.log").read_text()


async def test_grader_out_of_time_is_a_failure_and_not_zero(make_trial: MakeTrial) -> None:
    with pytest.raises(RewardError, match="deadline"):
        await grade(make_trial(), "hangs", timeout_s=0.5)
