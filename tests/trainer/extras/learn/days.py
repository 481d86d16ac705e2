"""Recorded sessions, a recorder without HTTP, and a learner on a tiny checkpoint."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from proxy.client import ProxyClientError
from proxy.control.record_view import session_view
from proxy.conversation.messages import Message, ToolCall, dump_answer
from proxy.extras.learn.assignment import Assignment, Switch
from proxy.extras.learn.section import Recorder
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
from tests.trainer.fake_engine import FakeEngine, fake_engine
from trainer.cluster.local import local_trainer
from trainer.extras.learn.command import open_folder
from trainer.extras.learn.config import LearnConfig
from trainer.extras.learn.learner import DailyLearner
from trainer.run.control import RunControl

POLICY = "work"


def session(name: str, *, rating: float | None = None, at: float = 1000.0, **more: Any) -> Session:
    found = Session(
        name,
        b"",
        SessionKind.TRAIN,
        SessionStatus.COMPLETED,
        created_at=at,
        expires_at=at + 60,
        completed_at=at + 10,
        metadata={"learn": "yes", **more.pop("metadata", {})},
        **more,
    )
    if rating is not None:
        found.rewards.append(Reward("rating", rating))
    return found


@dataclass
class Conversation:
    """Builds the turns of a session. Example:
    talk = Conversation("s"); talk.answer(call=("bash", {"command": "make test"}))
    talk.result("3 passed"); talk.answer("Done.")
    """

    name: str
    adapter: int = 0
    turns: list[Turn] = field(default_factory=list)
    waiting: list[dict[str, Any]] = field(default_factory=list)

    def user(self, text: str) -> Conversation:
        self.waiting.append(_message("user", text))
        return self

    def result(self, text: str) -> Conversation:
        call = json.loads(self.turns[-1].answer)["tool_calls"][0]["id"]
        self.waiting.append(_message("tool", text, tool_call_id=call))
        return self

    def answer(
        self,
        text: str = "",
        call: tuple[str, Any] | None = None,
        ids: Sequence[int] = (7, 8),
        **more: Any,
    ) -> Conversation:
        index = len(self.turns)
        calls = []
        if call is not None:
            given = call[1] if isinstance(call[1], str) else json.dumps(call[1])
            calls = [ToolCall(f"c{index}", call[0], given)]
        request = {"after": index - 1 if index else None, "messages": self.waiting}
        path = self.turns[-1].path_tokens if index else 0
        self.turns.append(
            Turn(
                session_id=self.name,
                index=index,
                parent=index - 1 if index else None,
                shared_tokens=path,
                fork_cause=None,
                prompt_ids=np.array([1, 2, 3], np.int32),
                request_key=b"",
                sampling={
                    "temperature": 1.0,
                    **({"policy": f"{POLICY}-{self.adapter}"} if self.adapter else {}),
                    **more.pop("sampling", {}),
                },
                request=json.dumps(request | ({} if index else {"tools": []})).encode(),
                sampled_ids=np.array(ids, np.int32),
                logprobs=np.full(len(ids), -2.0, np.float32),
                versions=(VersionSpan(more.pop("version", self.adapter), 0, len(ids)),),
                finish_reason=FinishReason.STOP,
                status=more.pop("status", TurnStatus.DONE),
                answer=dump_answer(Message("assistant", text, None, calls)),
                **more,
            )
        )
        self.waiting = []
        return self


def _message(role: str, text: str, tool_call_id: str | None = None) -> dict[str, Any]:
    fields: dict[str, Any] = {"role": role, "text": text, "reasoning": None, "tool_calls": []}
    return {**fields, "tool_call_id": tool_call_id}


@dataclass
class Days:
    """A recorder whose sessions a test writes."""

    record_of: dict[str, tuple[Session, list[Turn]]] = field(default_factory=dict)
    said: dict[str, str] = field(default_factory=dict)
    published: dict[int, str] = field(default_factory=dict)
    state: dict[str, Any] = field(
        default_factory=lambda: {
            "stable": 0,
            "canary": None,
            "order": "",
            "frozen": False,
            "since": 0.0,
            "switches": (),
        }
    )
    open: dict[str, int] = field(default_factory=dict)
    images: dict[str, bytes] = field(default_factory=dict)

    def day(self, name: str, good: bool | None, ids: Sequence[int] = (7, 8), **more: Any) -> None:
        """A session of one answer; `good`: how it was rated."""
        adapter = more.pop("adapter", self.state["stable"])
        sampling = more.pop("sampling", {})
        talk = Conversation(name, adapter).user("Do it.")
        talk.answer("Done.", ids=ids, sampling=sampling)
        rating = None if good is None else float(good)
        self.record_of[name] = (session(name, rating=rating, **more), talk.turns)

    async def readable(self, policy: str) -> list[dict[str, Any]]:
        return [session_view(found) for found, _ in self.record_of.values()]

    async def record(self, policy: str, name: str) -> tuple[Session, list[Turn]]:
        if name not in self.record_of:
            raise ProxyClientError("404", 404)
        return self.record_of[name]

    async def image_of(self, policy: str, name: str, sha256: str) -> bytes:
        if name not in self.record_of:
            raise ProxyClientError("404", 404)
        return self.images[sha256]

    async def say(self, policy: str, name: str, text: str) -> None:
        self.said[name] = text

    async def publish_adapter(self, policy: str, number: int, adapter: str) -> None:
        assert self.published.setdefault(number, adapter) == adapter

    async def assignment(self, policy: str) -> Mapping[str, Any]:
        return {**self.state, "open": dict(self.open)}

    def order(self, order: str, at: float, person: str) -> None:
        """As a person's order to the recorder."""
        self._keep(self._now().switched(order, at, person))

    async def assign(
        self, policy: str, *, done: str = "", told: str = "", canary: int | None = None, **now: Any
    ) -> None:
        for number in (now["stable"], canary):
            assert not number or number in self.published
        before = self._now()
        order = "" if done == before.order or canary != before.canary else before.order
        since = (before.since or 2000.0) + 10  # after the sessions of `day`
        self._keep(before.changed(since, **now, canary=canary, order=order).told(told))

    def _now(self) -> Assignment:
        switches = tuple(Switch(**each) for each in self.state["switches"])
        return Assignment(**self.state | {"switches": switches})

    def _keep(self, after: Assignment) -> None:
        self.state = asdict(after)


def config(checkpoint: Path, folder: Path, engine: str, **more: Any) -> LearnConfig:
    values: dict[str, Any] = {
        "recorder": Recorder(policy=POLICY, folder=folder),
        "engines": [engine],
        "model": {"path": checkpoint, "lora": {"rank": 2, "alpha": 4}},
        "optimizer": {"lr": 1e-2},
        "update": {"sessions": 4, "held_out": 0.0, "epochs": 2},
        "gates": {"max_mismatch": 100.0, "max_kl": 100.0},
        "canary": {"alpha": 0.1, "max_sessions": 24},
        "device": "cpu",
    }
    return LearnConfig.model_validate(values | more)


@asynccontextmanager
async def learner_of(
    checkpoint: Path, folder: Path, days: Days, **more: Any
) -> AsyncIterator[tuple[DailyLearner, FakeEngine]]:
    """A learner on the recorder, with its engine."""
    with fake_engine() as (engine, url):
        found = config(checkpoint, folder, url, **more)
        place = open_folder(folder)
        try:
            async with local_trainer(found.processes, place, RunControl(), []) as rank_zero:
                learner = DailyLearner(found, days, rank_zero)  # type: ignore[arg-type]
                await learner.begin()
                yield learner, engine
        finally:
            place.unlock()
