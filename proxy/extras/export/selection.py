"""Which sessions are exported: by id, kind, status, tag, reward and a predicate of yours.

Invariant: every session that is left out for another reason than the caller's own filters is
counted in `left_out`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from proxy.extras.export.protocol import Sample, TakesSessions
from proxy.records import RuleAction, Session, SessionKind, Turn, TurnStatus
from proxy.store.protocol import SessionFilter

NO_REWARD = "sessions without a reward (give one: agentic-proxy sessions rate ID up)"
PAGE = 100
"""Sessions read from the store at a time."""

Predicate = Callable[[Session, Sequence[Turn]], bool]


class RecordSource(Protocol):
    """Where recorded sessions are read: a store, or anything with these methods of a store."""

    async def list_sessions(self, where: SessionFilter) -> list[Session]: ...

    async def get_session(self, session_id: str) -> Session | None: ...

    async def get_turns(self, session_id: str) -> list[Turn]: ...


@dataclass(frozen=True, slots=True)
class Filters:
    """Example: Filters(tags={"task_id": "sum-17"}, min_reward=1.0)"""

    where: SessionFilter = field(default_factory=SessionFilter)
    ids: Sequence[str] = ()
    """Only these sessions; empty: all that match."""
    tags: Mapping[str, str] = field(default_factory=dict)
    """Entries that the session's metadata must have."""
    reward_key: str | None = None
    """The reward of a session is the one with this key; None: `Session.reward`."""
    min_reward: float = -math.inf
    max_reward: float = math.inf
    predicate: Predicate | None = None

    @property
    def on_reward(self) -> bool:
        return self.min_reward > -math.inf or self.max_reward < math.inf

    def reward(self, session: Session) -> float | None:
        """The session's reward; None if it has none. It is 0 if a search rule says so."""
        if self.reward_key is None or session.marked(RuleAction.ZERO_REWARD) is not None:
            return session.reward
        found = [reward.value for reward in session.rewards if reward.key == self.reward_key]
        return sum(found) if found else None


class ExportSelection:
    """The sessions of a source that a format exports."""

    def __init__(self, store: RecordSource, filters: Filters, form: TakesSessions) -> None:
        self._store = store
        self._filters = filters
        self._form = form
        self.left_out: Counter[str] = Counter()
        """Reason → number of sessions."""

    async def units(self) -> AsyncIterator[Sequence[Sample]]:
        """What the format's `rows` gets, one after the other."""
        rewards: dict[str, list[tuple[float, str]]] = {}
        if self._form.needs_reward:
            async for sample in self._samples():
                rewards.setdefault(sample.task_id, []).append(
                    (sample.reward or 0.0, sample.session.session_id)
                )
        if self._form.unit == "pair":
            async for pair in self._pairs(rewards):
                yield pair
            return
        self.left_out.clear()  # counted again below
        async for sample in self._samples(with_turns=True):
            group = [reward for reward, _ in rewards.get(sample.task_id, ())]
            mean = sum(group) / len(group) if group else 0.0
            advantage = (sample.reward or 0.0) - mean
            origins = await self._origins(sample.session)
            yield [replace(sample, advantage=advantage, origins=origins)]

    async def _pairs(
        self, rewards: Mapping[str, list[tuple[float, str]]]
    ) -> AsyncIterator[Sequence[Sample]]:
        """The best and the worst session of each task."""
        for group in rewards.values():
            (worst, worse_id), (best, better_id) = min(group), max(group)
            if best <= worst:
                self.left_out["tasks whose sessions have equal rewards"] += 1
                continue
            better = await self._load(better_id, best)
            worse = await self._load(worse_id, worst)
            if better is None or worse is None:
                self.left_out["tasks with a session that was removed during the export"] += 1
                continue
            yield [better, worse]

    async def _load(self, session_id: str, reward: float) -> Sample | None:
        session = await self._store.get_session(session_id)
        if session is None:
            return None
        turns, origins = await self._store.get_turns(session_id), await self._origins(session)
        return Sample(session, turns, reward, origins=origins)

    async def _origins(self, session: Session) -> list[Session]:
        """The sessions that a branch continues, the nearest first."""
        found: list[Session] = []
        while (point := session.origin) is not None:
            earlier = await self._store.get_session(point.session_id)
            if earlier is None:  # a folder of records may lack it
                break
            found.append(earlier)
            session = earlier
        return found

    async def _samples(self, *, with_turns: bool = False) -> AsyncIterator[Sample]:
        """The matching sessions; without their turns, unless these are needed."""
        filters, form = self._filters, self._form
        async for session in self._sessions():
            reward = filters.reward(session)
            if form.trains and session.kind is SessionKind.EVAL and filters.where.kind is None:
                self.left_out["sessions of kind eval (export them with --kind eval)"] += 1
                continue
            if reward is None and (form.needs_reward or filters.on_reward):
                self.left_out[NO_REWARD] += 1
                continue
            if reward is not None and not filters.min_reward <= reward <= filters.max_reward:
                continue
            turns: list[Turn] = []
            if with_turns or filters.predicate is not None or form.needs_reward:
                turns = await self._store.get_turns(session.session_id)
            if filters.predicate is not None and not filters.predicate(session, turns):
                continue
            if form.needs_reward and _lacks_logprobs(turns):
                self.left_out["sessions without log-probabilities (a text engine's)"] += 1
                continue
            yield Sample(session, turns, reward)

    async def _sessions(self) -> AsyncIterator[Session]:
        """By id, kind, status and tags."""
        where, tags = self._filters.where, self._filters.tags
        after: str | None = None
        while True:
            page = await self._store.list_sessions(replace(where, after=after, limit=PAGE))
            for session in page:
                chosen = not self._filters.ids or session.session_id in self._filters.ids
                if chosen and all(str(session.metadata.get(k)) == v for k, v in tags.items()):
                    yield session
            if len(page) < PAGE:
                return
            after = page[-1].session_id


def _lacks_logprobs(turns: Sequence[Turn]) -> bool:
    return any(t.status is TurnStatus.DONE and np.isnan(t.logprobs).any() for t in turns)
