"""The replayed turns of a branch: which of them the agent has reached."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from random import Random
from typing import SupportsIndex, overload

import numpy as np
import pytest
from msgspec.structs import replace

from proxy.control.replay_view import replay_view
from proxy.records import Origin, Session, Turn
from proxy.store import open_store
from proxy.store.protocol import DeliveryMark, Store
from tests.proxy.store.test_conformance import a_session, an_intent

TURNS = 1000


class CountedTurns(list[Turn]):
    """Counts how often a turn is read."""

    reads = 0

    @overload
    def __getitem__(self, index: SupportsIndex, /) -> Turn: ...
    @overload
    def __getitem__(self, index: slice, /) -> list[Turn]: ...
    def __getitem__(self, index: SupportsIndex | slice, /) -> Turn | list[Turn]:
        self.reads += 1
        return super().__getitem__(index)


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    opened = await open_store(f"sqlite:///{tmp_path}/s.db")
    yield opened
    await opened.close()


def a_turn(index: int, parent: Turn | None, shared_tokens: int) -> Turn:
    return replace(
        an_intent("b", index),
        parent=None if parent is None else parent.index,
        shared_tokens=shared_tokens,
        prompt_ids=np.arange(10, dtype=np.int32),
    )


async def a_branch(store: Store, origin_turns: int, replayed: set[int]) -> Session:
    await store.create_session(a_session("parent"))
    session = a_session("b", origin=Origin("parent", origin_turns))
    await store.create_session(session)
    await store.mark_deliveries([DeliveryMark("b", index, arrived=True) for index in replayed])
    return session


async def test_long_branch_is_read_a_bounded_number_of_times_per_turn(store: Store) -> None:
    first = a_turn(0, None, 0)
    turns = CountedTurns([first])
    for index in range(1, TURNS):
        turns.append(a_turn(index, turns[-1], turns[-1].path_tokens))
    turns.reads = 0
    session = await a_branch(store, 5, set())
    view = await replay_view(store, session, turns)
    assert view is not None
    assert view["turns"] == [0, 1, 2, 3, 4]
    assert turns.reads <= 10 * TURNS


def reached_by(index: int, turns: Sequence[Turn]) -> set[int]:
    """The turn and all turns whose whole paths it continues."""
    found, at = {index}, turns[index].parent
    while at is not None:
        if turns[at].path_tokens <= turns[index].shared_tokens:
            found.add(at)
        at = turns[at].parent
    return found


@pytest.mark.parametrize("seed", range(20))
async def test_turns_whose_answers_others_continue_are_reached(store: Store, seed: int) -> None:
    random = Random(seed)
    turns = [a_turn(0, None, 0)]
    for index in range(1, 30):
        parent = random.choice(turns[-4:])
        shared = random.choice([parent.path_tokens, random.randint(0, parent.path_tokens)])
        turns.append(a_turn(index, parent, shared))
    session = await a_branch(store, 20, {3, 11})
    view = await replay_view(store, session, turns)
    assert view is not None
    expected = set[int]().union(*(reached_by(i, turns) for i in (3, 11, *range(20, 30))))
    assert view["turns"] == sorted(i for i in expected if i < 20)
