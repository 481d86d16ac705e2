"""Every sampled token is trained in exactly one place, over a session and all of its branches."""

from __future__ import annotations

import asyncio
import dataclasses
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from agent_loop.records import (
    CALL_CHARS,
    AgentEnd,
    AgentResult,
    Graded,
    RolloutStatus,
    Segment,
    Task,
)
from agent_loop.trajectory import build_segments, flatten
from agent_loop.trial.credit import CreditConfig, assign_credit
from agent_loop.trial.outcome import Attempt, build_rollout
from proxy.conversation.messages import Message, ToolCall, dump_answer
from proxy.errors import SessionError
from proxy.records import Origin, Session, SessionKind, SessionStatus, Turn, TurnStatus
from proxy.store.sqlite import SqliteStore
from tests.agent_loop.recorded import full_path, token_trees, turn


@st.composite
def families(draw: st.DrawFn) -> list[tuple[Origin | None, list[Turn]]]:
    """Sessions with their own turns; each but the first branches from an earlier one."""
    family: list[tuple[Origin | None, list[Turn]]] = [(None, draw(token_trees(max_turns=6)))]
    for number in range(draw(st.integers(0, 4))):
        of = draw(st.integers(0, number))
        known = _turns(family, of)
        if not known:
            continue
        origin = Origin(str(of), draw(st.integers(1, len(known))), salvage=draw(st.booleans()))
        last = known[origin.turn - 1]
        moved = [
            replace(
                t,
                index=t.index + origin.turn,
                parent=last.index if t.parent is None else t.parent + origin.turn,
                shared_tokens=t.shared_tokens + last.path_tokens,
            )
            for t in draw(token_trees(max_turns=3))
        ]
        family.append((origin, moved))
    return family


def _turns(family: Sequence[tuple[Origin | None, list[Turn]]], number: int) -> list[Turn]:
    """The turns of a session, including those of its origins."""
    origin, own = family[number]
    if origin is None:
        return own
    return _turns(family, int(origin.session_id))[: origin.turn] + own


async def stored(family: Sequence[tuple[Origin | None, list[Turn]]]) -> dict[str, list[Turn]]:
    """What the store returns for each session; a second salvage of a session is refused."""
    with tempfile.TemporaryDirectory() as folder:
        store = SqliteStore(Path(folder) / "s.sqlite")
        for number, (origin, own) in enumerate(family):
            name = str(number)
            session = Session(
                name, name.encode(), SessionKind.TRAIN, SessionStatus.OPEN, 0.0, 1.0, origin=origin
            )
            try:
                await store.create_session(session)
            except SessionError:
                assert origin is not None
                await store.create_session(
                    dataclasses.replace(session, origin=dataclasses.replace(origin, salvage=False))
                )
            for each in own:
                intent = replace(each, session_id=name)
                await store.begin_turn(intent)
                await store.commit_turn(intent)
        found = {str(n): await store.get_turns(str(n)) for n in range(len(family))}
        await store.close()
    return found


def trained(segments: Sequence[Segment], turns: Sequence[Turn]) -> Counter[tuple[str, int]]:
    """Number of trained tokens by the turn that sampled them."""
    found: Counter[tuple[str, int]] = Counter()
    for path in flatten(segments):
        for index in path.turns[path.mask].tolist():
            found[turns[index].session_id, turns[index].index] += 1
    return found


@settings(max_examples=60, deadline=None)
@given(families())
def test_each_sampled_token_is_trained_once(
    family: list[tuple[Origin | None, list[Turn]]],
) -> None:
    sessions = asyncio.run(stored(family))
    total: Counter[tuple[str, int]] = Counter()
    for turns in sessions.values():
        segments = build_segments(turns)
        total += trained(segments, turns)
        for path in flatten(segments):
            last = int(path.turns[-1])
            assert full_path(turns, last)[: len(path)].tolist() == path.ids.tolist()
    sampled = Counter(
        {
            (str(number), each.index): len(each.sampled_ids)
            for number, (_, own) in enumerate(family)
            for each in own
            if each.sampled
        }
    )
    assert total == sampled


def test_reward_of_a_branch_goes_to_its_own_turns() -> None:
    turns = [
        replace(turn(0, None, 0, [1], [2, 3], status=TurnStatus.CONTEXT), session_id="parent"),
        turn(1, 0, 3, [4], [5]),
        turn(2, 1, 5, [6], [7]),
    ]
    credit = assign_credit(turns, 1.0, [], CreditConfig(turn_discount=0.5))
    assert credit.returns == {1: 0.5, 2: 1.0}
    rollout = build_rollout(
        Attempt("b", Task("t", {})), AgentResult(AgentEnd.EXITED), turns, Graded(1.0)
    )
    assert (rollout.status, rollout.num_turns, rollout.sampled_tokens) == (RolloutStatus.DONE, 2, 2)
    (segment,) = rollout.segments
    assert segment.mask.tolist() == [False] * 4 + [True, False, True]


def test_rollout_has_the_tool_calls_of_its_answers() -> None:
    called = [ToolCall("a", "bash", '{\n"command": "ls"}'), ToolCall("b", "submit", "x" * 1000)]
    turns = [
        turn(0, None, 0, [1], [2]),
        replace(
            turn(1, 0, 2, [3], [4]), answer=dump_answer(Message("assistant", tool_calls=called))
        ),
        replace(turn(2, 1, 4, [5], [6]), answer=dump_answer(Message("assistant", "done"))),
    ]
    rollout = build_rollout(
        Attempt("b", Task("t", {})), AgentResult(AgentEnd.EXITED), turns, Graded(1.0)
    )
    cut = f"submit {'x' * 1000}"[:CALL_CHARS]
    assert rollout.turn_calls == {1: f'bash {{ "command": "ls"}}\n{cut}'}


def test_branch_that_sampled_nothing_fails_with_the_reason() -> None:
    replayed = replace(turn(0, None, 0, [1], [2], status=TurnStatus.CONTEXT), session_id="parent")
    rollout = build_rollout(
        Attempt("b", Task("t", {})), AgentResult(AgentEnd.CRASHED, "exit code 1"), [replayed],
        Graded(1.0),
    )  # fmt: skip
    assert rollout.status is RolloutStatus.FAILED
    assert rollout.error == (
        "the agent never had an answer from the model after the 1 recorded ones (exit code 1)"
    )
