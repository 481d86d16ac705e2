"""Recorded turns for tests: by hand, and random trees for property tests."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import strategies as st
from msgspec.structs import replace

from agent_loop.records import AgentEnd, AgentResult, FinishedTrial, Trial
from proxy.conversation.messages import Message, dump_answer
from proxy.records import (
    FinishReason,
    ForkCause,
    Ids,
    Reward,
    Session,
    SessionKind,
    SessionStatus,
    Turn,
    TurnStatus,
    VersionSpan,
)


def turn(
    index: int,
    parent: int | None,
    shared: int,
    prompt: Sequence[int],
    sampled: Sequence[int],
    *,
    status: TurnStatus = TurnStatus.DONE,
    cause: ForkCause | None = None,
    version: int = 0,
    finish: FinishReason = FinishReason.STOP,
    agent_id: str | None = None,
) -> Turn:
    return Turn(
        session_id="s",
        index=index,
        parent=parent,
        shared_tokens=shared,
        fork_cause=cause,
        prompt_ids=np.array(prompt, np.int32),
        request_key=b"%d" % index,
        sampling={},
        sampled_ids=np.array(sampled, np.int32),
        logprobs=np.arange(1, len(sampled) + 1, dtype=np.float32) / np.float32(-8),
        versions=(VersionSpan(version, 0, len(sampled)),) if sampled else (),
        finish_reason=finish,
        status=status,
        agent_id=agent_id,
    )


def finished(
    trial: Trial,
    *,
    agent: AgentResult | None = None,
    rewards: Sequence[Reward] = (),
    answers: Sequence[str] = (),
) -> FinishedTrial:
    """A finished trial whose session has these rewards and answers."""
    session = Session(
        trial.trial_id, b"", SessionKind.TRAIN, SessionStatus.COMPLETED, 0.0, 1.0,
        rewards=list(rewards),
    )  # fmt: skip
    turns = [turn(i, None, 0, [1], [2]) for i in range(len(answers))]
    turns = [
        replace(answered, answer=dump_answer(Message("assistant", content)))
        for answered, content in zip(turns, answers, strict=True)
    ]
    return FinishedTrial(trial, agent or AgentResult(AgentEnd.EXITED), session, turns)


def full_path(turns: Sequence[Turn], index: int | None) -> Ids:
    """The token ids of a path, computed literally by the definition in `proxy.records`."""
    if index is None:
        return np.zeros(0, np.int32)
    it = turns[index]
    shared = full_path(turns, it.parent)[: it.shared_tokens]
    return np.concatenate([shared, it.prompt_ids, it.sampled_ids])


@st.composite
def token_trees(draw: st.DrawFn, max_turns: int = 12) -> list[Turn]:
    """Any tree that the records allow: with any fork points, statuses, lengths and version
    spans."""
    turns: list[Turn] = []
    token = 0
    for index in range(draw(st.integers(1, max_turns))):
        parent = draw(st.one_of(st.none(), st.integers(0, index - 1))) if index else None
        longest = turns[parent].path_tokens if parent is not None else 0
        shared = draw(st.sampled_from([longest, draw(st.integers(0, longest))]))
        prompt = draw(st.integers(0, 4)) if shared else draw(st.integers(1, 4))
        sampled = draw(st.integers(0, 5))
        made = turn(
            index,
            parent,
            shared,
            range(token, token + prompt),
            range(token + prompt, token + prompt + sampled),
            status=draw(st.sampled_from([TurnStatus.DONE, *TurnStatus])),
            cause=None if shared == longest else ForkCause.EDITED,
        )
        token += prompt + sampled
        middle = draw(st.integers(0, sampled))
        spans = (VersionSpan(index, 0, middle), VersionSpan(index + 1, middle, sampled))
        covering = tuple(span for span in spans if span.end > span.start)
        turns.append(replace(made, versions=covering))
    return turns
