"""Exports contain every sampled token exactly once, for every tree."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings

from proxy.commands.export import export
from proxy.control.record_view import trajectories_view
from proxy.records import Session, SessionKind, SessionStatus, Turn, TurnStatus
from tests.agent_loop.recorded import full_path, token_trees
from tests.agent_loop.recorded import turn as a_turn

SESSION = Session("t", b"", SessionKind.TRAIN, SessionStatus.OPEN, 1.0, 2.0)


def as_json(turns: list[Turn], folder: Path) -> list[dict[str, Any]]:
    """The JSON of `GET …/trajectories`."""
    data = orjson.dumps(trajectories_view(turns), option=orjson.OPT_SERIALIZE_NUMPY)
    rows: list[dict[str, Any]] = orjson.loads(data)
    return rows


def as_jsonl(turns: list[Turn], folder: Path) -> list[dict[str, Any]]:
    asyncio.run(export(one(turns), folder / "out.jsonl", "jsonl"))
    return [orjson.loads(line) for line in (folder / "out.jsonl").read_bytes().splitlines()]


def as_parquet(turns: list[Turn], folder: Path) -> list[dict[str, Any]]:
    asyncio.run(export(one(turns), folder / "out.parquet", "parquet"))
    rows: list[dict[str, Any]] = pq.read_table(folder / "out.parquet").to_pylist()
    return rows


async def one(turns: list[Turn]) -> AsyncIterator[tuple[Session, list[Turn]]]:
    yield SESSION, turns


@pytest.mark.parametrize("read", [as_json, as_jsonl, as_parquet])
def test_every_sampled_token_is_marked_exactly_once(read: Any, tmp_path: Path) -> None:
    @settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
    @given(token_trees())
    def check(turns: list[Turn]) -> None:
        rows = read(turns, tmp_path)
        marked = Counter[int]()
        for row in rows:
            path = full_path(turns, row["turns"][-1]).tolist()
            assert row["ids"] == path
            assert len(row["sampled"]) == len(row["logprobs"]) == len(path)
            marked.update(np.array(row["ids"], int)[np.array(row["sampled"], bool)].tolist())
        done = [turn for turn in turns if turn.status is TurnStatus.DONE]
        wanted = Counter(token for turn in done for token in turn.sampled_ids.tolist())
        assert marked == wanted  # the tree's token ids are all different

    check()


def test_answer_is_exported_if_the_next_call_forks_inside_its_prompt() -> None:
    turns = [a_turn(0, None, 0, [1, 2, 3], [4, 5]), a_turn(1, 0, 2, [6], [7])]
    rows = trajectories_view(turns)
    assert [row["ids"].tolist() for row in rows] == [[1, 2, 3, 4, 5], [1, 2, 6, 7]]
    assert [row["sampled"].tolist() for row in rows] == [
        [False, False, False, True, True],
        [False, False, False, True],
    ]
