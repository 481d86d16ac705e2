"""The cause of a fork names what changed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from msgspec.structs import replace

from proxy.conversation.messages import Message, ToolCall
from proxy.records import ForkCause
from proxy.token_tree.fork_cause import AnswerMarks, cause_of

CALLS = [ToolCall("c0", "read", '{"n": 1}'), ToolCall("c1", "write", '{"n": 2}')]
ANSWER = Message("assistant", "Line one.\nLine two.", "I want to see.", CALLS)
Change = Callable[[Message], Message]

CHANGES: list[tuple[ForkCause, Change]] = [
    (ForkCause.TEXT_DROPPED, lambda m: replace(m, text="")),
    (ForkCause.WHITE_SPACE, lambda m: replace(m, text=m.text.replace("\n", "\r\n"))),
    (ForkCause.WHITE_SPACE, lambda m: replace(m, text="Line one.\n\nLine two.")),
    (ForkCause.WHITE_SPACE, lambda m: replace(m, text="Line one.Line two.")),
    (ForkCause.REASONING_MOVED, lambda m: replace(m, text=f"*{m.reasoning}*\n{m.text}")),
    (ForkCause.REASONING_MOVED, lambda m: replace(m, text=f"{m.text}\n{m.reasoning}")),
    (
        ForkCause.TOOL_ARGUMENTS,
        lambda m: replace(m, tool_calls=[CALLS[0], replace(CALLS[1], arguments='{"n": 3}')]),
    ),
    (ForkCause.CALLS_CHANGED, lambda m: replace(m, tool_calls=CALLS[:1])),
    (ForkCause.CALLS_CHANGED, lambda m: replace(m, tool_calls=[])),
    (
        ForkCause.CALLS_CHANGED,
        lambda m: replace(m, tool_calls=[CALLS[0], replace(CALLS[1], name="erase")]),
    ),
    (ForkCause.EDITED, lambda m: replace(m, text="Line one.\nLine three.")),
    (ForkCause.EDITED, lambda m: replace(m, text="", tool_calls=CALLS[:1])),
]


@pytest.mark.parametrize("follows", [False, True])
@pytest.mark.parametrize(("cause", "change"), CHANGES)
def test_cause_of_a_changed_answer_names_the_change(
    cause: ForkCause, change: Change, follows: bool
) -> None:
    recorded = [AnswerMarks.of(ANSWER)]
    assert cause_of(change(ANSWER), recorded, follows=follows) is cause


def test_reasoning_counts_only_if_the_profile_follows_the_agent() -> None:
    recorded = [AnswerMarks.of(ANSWER)]
    dropped, changed = replace(ANSWER, reasoning=None), replace(ANSWER, reasoning="Other.")
    assert cause_of(dropped, recorded, follows=True) is ForkCause.REASONING_DROPPED
    assert cause_of(changed, recorded, follows=True) is ForkCause.REASONING_CHANGED


def test_most_similar_of_several_answers_determines_the_cause() -> None:
    other = AnswerMarks.of(Message("assistant", "Something else."))
    for recorded in ([other, AnswerMarks.of(ANSWER)], [AnswerMarks.of(ANSWER), other]):
        assert cause_of(CHANGES[0][1](ANSWER), recorded, follows=False) is ForkCause.TEXT_DROPPED


def test_assistant_message_without_a_recorded_answer_is_foreign() -> None:
    assert cause_of(ANSWER, [], follows=False) is ForkCause.FOREIGN_ASSISTANT
