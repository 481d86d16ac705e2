"""The Python grader: its reward, and failures that raise instead of giving a reward of 0."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from agent_loop.errors import RewardError
from agent_loop.records import Graded, Trial
from agent_loop.rewards.grader import Grader, GraderConfig, answers
from proxy.conversation.messages import Message, ToolCall, dump_answer
from tests.agent_loop.conftest import MakeTrial
from tests.agent_loop.recorded import finished, turn


async def grade(trial: Trial, function: str, answer: str = "42", timeout_s: float = 20) -> Graded:
    trial.workspace.mkdir()
    target = f"tests.agent_loop.functions:{function}"
    grader = Grader(GraderConfig(target=target, timeout_s=timeout_s))
    try:
        return await grader.grade(finished(trial, answers=[answer]))
    finally:
        await grader.close()


@pytest.mark.parametrize(("answer", "value"), [("42", 1.0), ("41", 0.0)])
async def test_grader_gets_the_models_answers(
    make_trial: MakeTrial, answer: str, value: float
) -> None:
    assert await grade(make_trial(answer="42"), "exact_answer", answer) == Graded(value)


def test_answers_are_messages_of_chat_completions() -> None:
    calls = [ToolCall("call_1", "Read", '{"path": "a"}')]
    said = [Message("assistant", "", "I look.", calls), Message("assistant", "It says 7.")]
    turns = [
        replace(turn(index, None, 0, [1], [2]), answer=dump_answer(message))
        for index, message in enumerate(said)
    ]
    function = {"name": "Read", "arguments": '{"path": "a"}'}
    assert answers(turns) == [
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "I look.",
            "tool_calls": [{"id": "call_1", "type": "function", "function": function}],
        },
        {"role": "assistant", "content": "It says 7."},
    ]


async def test_none_means_no_reward(make_trial: MakeTrial) -> None:
    assert await grade(make_trial(), "gives_no_reward") == Graded(None)


async def test_exception_is_a_reward_error_instead_of_reward_0(make_trial: MakeTrial) -> None:
    trial = make_trial()
    with pytest.raises(RewardError, match=r"exit code 1; see .*grader\.log"):
        await grade(trial, "raises")
    assert "grader is broken" in (trial.directory / "grader.log").read_text()


async def test_grader_that_times_out_is_a_reward_error_instead_of_reward_0(
    make_trial: MakeTrial,
) -> None:
    with pytest.raises(RewardError, match="deadline"):
        await grade(make_trial(), "hangs", timeout_s=0.5)


async def test_passed_variables_reach_the_function_and_the_configured_key_trains(
    make_trial: MakeTrial, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REGION", "eu")
    trial = make_trial()
    trial.workspace.mkdir()
    target = "tests.agent_loop.functions:grades_its_region"
    grader = Grader(GraderConfig(target=target, pass_env=("REGION",), key="region"))
    graded = await grader.grade(finished(trial, answers=["42"]))
    await grader.close()
    assert graded == Graded(1.0, {"reward": 0.0, "region": 1.0})
