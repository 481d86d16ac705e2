"""Finds the calls in which an agent summarises its history: a compaction's own turns.

An agent that compacts asks for a summary and then begins again with a prompt that quotes the
answer. Such a prompt is a fork with the cause `compaction`; the summary is the latest earlier
answer of which the prompt quotes a line, as in `proxy.token_tree.fork_cause`.
"""

from __future__ import annotations

from collections.abc import Sequence

from proxy.conversation.messages import load_answer
from proxy.conversation.recorded import load_request
from proxy.records import ForkCause, Turn
from proxy.token_tree.fork_cause import QUOTED_TURNS, AnswerMarks, is_quoted


def summaries(turns: Sequence[Turn]) -> dict[int, int]:
    """Index of the first turn after each compaction → index of the turn that sampled its summary.

    A compaction whose request was not recorded (by an earlier program) has no entry.
    """
    return {
        turn.index: found
        for turn in turns
        if turn.fork_cause is ForkCause.COMPACTION
        if (found := _quoted(turn, turns)) is not None
    }


def _quoted(turn: Turn, turns: Sequence[Turn]) -> int | None:
    request = load_request(turn)
    if request is None:
        return None
    answered = [earlier for earlier in turns[: turn.index] if earlier.sampled and earlier.answer]
    for earlier in reversed(answered[-QUOTED_TURNS:]):
        if is_quoted(request.messages, {AnswerMarks.of(load_answer(earlier.answer)).quote}):
            return earlier.index
    return None
