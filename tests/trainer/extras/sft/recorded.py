"""Recorded sessions to imitate: a small agent with a tool, of an engine or of a text-only one."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from msgspec.structs import replace

from proxy.config import RenderingConfig
from proxy.conversation.message_keys import conversation_keys
from proxy.conversation.messages import Conversation, Message, ToolCall, dump_answer
from proxy.conversation.recorded import dump_request
from proxy.extras.export.protocol import Sample
from proxy.records import (
    FinishReason,
    Reward,
    Session,
    SessionKind,
    SessionStatus,
    Turn,
    TurnStatus,
    VersionSpan,
)
from proxy.rendering.rendering import Rendering
from proxy.rendering.tokenizer import load_tokenizer
from proxy.store import open_store
from proxy.token_tree.rendered import rendered_turns

SYSTEM = Message("system", "You add numbers. Use the tool add for every sum that you are asked.")
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds two numbers.",
            "parameters": {"type": "object", "properties": {"a": {}, "b": {}}},
        },
    }
]


def rendering_of(model: Path) -> Rendering:
    return Rendering(load_tokenizer(model), RenderingConfig())


def text_turns(session_id: str, number: int) -> list[Turn]:
    """A tool call and the answer after its result, as a text-only engine records them."""
    asked = Message("user", f"What is {number} + {number}?")
    call = ToolCall(f"call-{number}", "add", f'{{"a": {number}, "b": {number}}}')
    called = Message("assistant", tool_calls=[call])
    result = Message("tool", str(2 * number), tool_call_id=call.id)
    first = Conversation([SYSTEM, asked], TOOLS)
    second = Conversation([SYSTEM, asked, called, result], TOOLS)
    return [
        _text_turn(session_id, 0, first, called, dump_request(first, -1, None)),
        _text_turn(
            session_id,
            1,
            second,
            Message("assistant", f"{2 * number}."),
            dump_request(second, 2, 0),
        ),
    ]


def _text_turn(
    session_id: str, index: int, asked: Conversation, answer: Message, request: bytes
) -> Turn:
    key = conversation_keys(asked)[-1]
    return Turn(
        session_id=session_id,
        index=index,
        parent=None,
        shared_tokens=0,
        fork_cause=None,
        prompt_ids=np.arange(4, dtype=np.int32),
        request_key=key.stored(),
        sampling={},
        request=request,
        sampled_ids=np.arange(3, dtype=np.int32),
        logprobs=np.full(3, np.nan, np.float32),
        finish_reason=FinishReason.STOP,
        status=TurnStatus.DONE,
        answer_key=key.answered(answer).stored(),
        answer=dump_answer(answer),
    )


def exact_turns(session_id: str, number: int, rendering: Rendering) -> list[Turn]:
    """The same, as an engine with the model of `rendering` records them."""
    return [
        replace(
            turn,
            logprobs=np.full(len(turn.sampled_ids), -0.5, np.float32),
            versions=(VersionSpan(0, 0, len(turn.sampled_ids)),),
        )
        for turn in rendered_turns(text_turns(session_id, number), rendering)
    ]


def session_of(name: str, kind: SessionKind = SessionKind.TRAIN) -> Session:
    now = time.time()
    return Session(
        session_id=name,
        key_hash=name.encode().ljust(32),
        kind=kind,
        status=SessionStatus.OPEN,
        created_at=now,
        expires_at=now + 3600,
        metadata={"task_id": name.partition(".")[0]},
    )


def sample_of(name: str, turns: Sequence[Turn]) -> Sample:
    return Sample(session_of(name), turns, 1.0)


async def write_sessions(file: Path, model: Path, count: int) -> None:
    """`count` sessions on exact ids, of which every third has the reward 0; and a text-only one of
    kind eval with the reward 1."""
    rendering = rendering_of(model)
    store = await open_store(f"sqlite:///{file}")
    for number in range(count + 1):
        is_text = number == count
        name = f"sum-{number:03d}.0"
        kind = SessionKind.EVAL if is_text else SessionKind.TRAIN
        await store.create_session(session_of(name, kind))
        turns = text_turns(name, number) if is_text else exact_turns(name, number, rendering)
        for turn in turns:
            await store.begin_turn(turn)
            await store.commit_turn(turn)
        await store.add_reward(name, Reward("verifier", float(is_text or number % 3 > 0)))
    await store.close()
