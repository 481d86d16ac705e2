"""Random token trees whose turns have recorded requests, for property tests of the formats."""

from __future__ import annotations

from hypothesis import strategies as st
from msgspec.structs import replace

from proxy.conversation.messages import Conversation, Message, dump_answer
from proxy.conversation.recorded import dump_request, dump_same_request
from proxy.extras.export.protocol import Sample
from proxy.records import Reward, Session, SessionKind, SessionStatus, Turn, TurnStatus
from tests.agent_loop.recorded import token_trees


def a_session(session_id: str = "t", reward: float | None = 1.0, task: str = "t-1") -> Session:
    metadata = {"task_id": task, "source": "tests"}
    session = Session(
        session_id, b"", SessionKind.TRAIN, SessionStatus.COMPLETED, 1.0, 2.0, metadata=metadata
    )
    if reward is not None:
        session.rewards.append(Reward("verifier", reward))
    return session


def a_sample(turns: list[Turn]) -> Sample:
    return Sample(a_session(), turns, 1.0, 0.25)


@st.composite
def recorded_trees(draw: st.DrawFn) -> list[Turn]:
    """Trees in which each request continues any earlier answer, repeats one, or begins a new
    conversation."""
    turns: list[Turn] = []
    for turn in draw(token_trees()):
        earlier = [t.index for t in turns if t.answer]
        after = draw(st.sampled_from([None, *earlier]))
        conversation = Conversation([Message("user", f"question {turn.index}")])
        request = dump_request(conversation, -1, after)
        if draw(st.booleans()) and turns:
            request = dump_same_request(draw(st.integers(0, turn.index - 1)))
        answer = dump_answer(Message("assistant", f"answer {turn.index}"))
        has_answer = turn.status is TurnStatus.DONE and len(turn.sampled_ids) > 0
        turns.append(replace(turn, request=request, answer=answer if has_answer else b""))
    return turns
