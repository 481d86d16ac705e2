"""Trees in pieces: each token once, in order, and never more than a micro-batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_loop.records import Group, Rollout, RolloutStatus, Segment, Task
from tests.trainer.rollouts import group
from trainer.batch import Batch, build_batch
from trainer.rows import prefix_tree
from trainer.rows.packing import MicroBatch
from trainer.rows.prefix_tree import Forest, divide, in_reading_order, lay_out


def make_batch(seed: int, groups: int = 3, size: int = 5, segments: int = 4) -> Batch:
    rng = np.random.default_rng(seed)
    return build_batch([group(rng, f"g{i}", size=size, segments=segments) for i in range(groups)])


def rank_rows(batch: Batch, max_tokens: int, ranks: int) -> list[list[MicroBatch]]:
    rows = divide(
        batch, max_tokens=max_tokens, share_prefixes=True, in_pieces=True, multiple_of=ranks
    )
    return [lay_out(batch, rows[rank::ranks]) for rank in range(ranks)]


def path_of(micro: MicroBatch, at: int) -> torch.Tensor:
    """Indices in the row, with what is in front, of the tokens that token `at` attends to."""
    row = micro.layout.past + at
    return torch.arange(row + 1)[micro.layout.ends[: row + 1] > row]


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**20), max_tokens=st.integers(4, 200), ranks=st.integers(1, 3))
def test_each_token_is_trained_once_after_its_own_path(
    seed: int, max_tokens: int, ranks: int
) -> None:
    batch = make_batch(seed)
    targets: list[int] = []
    kinds = set()
    for micros in rank_rows(batch, max_tokens, ranks):
        kinds.add(tuple(micro.reads_only for micro in micros))
        kept: dict[int, torch.Tensor] = {}  # the ids of the open tokens of each piece
        trained = set()
        for micro in micros:
            piece = micro.piece
            if piece is None:
                assert not len(micro.targets) or max_tokens >= 1
                targets += micro.targets.tolist()
                continue
            front = [kept[number][:count] for number, count in piece.past]
            ids = torch.cat([*front, micro.ids])
            assert len(ids) == len(micro.layout.ends)
            assert len(micro.ids) <= max_tokens
            if micro.reads_only:
                assert len(piece.open_rows) == len(micro.ids)
                kept[piece.number] = micro.ids
                assert piece.number not in trained
            else:
                if len(piece.open_rows):
                    assert torch.equal(kept.pop(piece.number), micro.ids[piece.open_rows])
                trained.add(piece.number)
                targets += micro.targets.tolist()
            depths = micro.layout.depths[micro.layout.past :]
            assert torch.equal(depths, micro.positions)
            for target, at in zip(micro.targets.tolist(), micro.predictors.tolist(), strict=True):
                seen = ids[path_of(micro, at)]
                position = int(batch.position[target])
                sequence = batch.sequences[int(batch.sequence[target])]
                assert seen.tolist() == sequence[:position].tolist()
        assert not kept
    assert sorted(targets) == list(range(batch.num_tokens))
    assert len(kinds) == 1


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**20), max_tokens=st.integers(20, 60))
def test_pieces_compute_the_tokens_of_the_tree(seed: int, max_tokens: int) -> None:
    batch = make_batch(seed)
    (micros,) = rank_rows(batch, max_tokens, 1)
    trained = [micro for micro in micros if not micro.reads_only]
    if all(micro.piece is not None for micro in trained):
        tree = Forest.of(batch, range(len(batch.sequences))).tokens
        assert sum(len(micro.ids) for micro in trained) == tree
        assert sum(micro.share for micro in micros) == pytest.approx(1)
        numbers = [micro.piece.number for micro in in_reading_order(micros) if micro.piece]
        assert numbers == list(range(len(trained)))
        finished = torch.cat([micro.piece.finished for micro in trained if micro.piece])
        assert sorted(finished.tolist()) == list(range(batch.num_tokens))


def one_prefix(prompt: int, trials: int, own: int, groups: int = 1) -> Batch:
    """Trials that share their prompt, also with the other groups, and nothing else."""
    rng = np.random.default_rng(0)
    first = rng.integers(0, 90, prompt)
    made = []
    for g in range(groups):
        task = Task(f"g{g}", {})
        rollouts = []
        for trial in range(trials):
            mine = rng.integers(0, 90, own)
            mine[0] = 8 * g + trial
            ids = np.concatenate([first, mine]).astype(np.int32)
            mask = np.arange(len(ids)) >= prompt + 1
            none = np.zeros(len(ids), np.int32)
            segment = Segment(-1, ids, mask, none.astype(np.float32), none, none)
            rollouts.append(
                Rollout(f"{g}-{trial}", task, RolloutStatus.DONE, 1.0, segments=(segment,))
            )
        made.append(Group(f"g{g}", task, rollouts))
    return build_batch(made)


@pytest.mark.parametrize("max_tokens", [4096, 8192, 16384, 65536])
@pytest.mark.parametrize(
    ("prompt", "own", "groups"),
    [(18_900, 300, 1), (18_900, 4_000, 1), (8_400, 300, 1), (18_900, 300, 4)],
)
def test_long_prefix_is_computed_once(prompt: int, own: int, groups: int, max_tokens: int) -> None:
    batch = one_prefix(prompt, 8, own, groups)
    (micros,) = rank_rows(batch, max_tokens, 1)
    trained = sum(len(micro.ids) for micro in micros if not micro.reads_only)
    read = sum(len(micro.ids) for micro in micros if micro.reads_only)
    tree = prompt + 8 * own * groups
    assert trained == tree
    assert read <= prompt + own
    assert max(len(micro.ids) for micro in micros) <= max_tokens


def long_conversation(tokens: int) -> Batch:
    """Two trials of which all but the last answer is one path; every fourth token was sampled."""
    ids = np.random.default_rng(0).integers(0, 90, tokens + 4).astype(np.int32)
    none = np.zeros(tokens + 4, np.int32)
    rollouts = []
    for trial in range(2):
        own, mask = ids.copy(), np.arange(tokens + 4) % 4 == 3
        own[tokens], mask[tokens:] = trial, True
        segment = Segment(-1, own, mask, none.astype(np.float32), none, none)
        rollouts.append(
            Rollout(f"{trial}", Task("g", {}), RolloutStatus.DONE, 1.0, segments=(segment,))
        )
    return build_batch([Group("g", Task("g", {}), rollouts)])


def test_late_pieces_of_a_conversation_look_up_no_more_than_early_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is sorted, looked up or written for a piece is its own tokens and the pieces, not all
    tokens that stand before it, which its attention alone reads."""
    looked_up: list[int] = []

    class Counting:
        def __getattr__(self, name: str) -> Any:
            found = getattr(np, name)
            if name not in ("searchsorted", "isin", "unique", "argsort", "sort"):
                return found

            def counted(first: Any, *others: Any, **named: Any) -> Any:
                looked_up.append(np.size(others[0] if name == "searchsorted" else first))
                return found(first, *others, **named)

            return counted

    costs = []
    for tokens in (2_000, 8_000):
        batch = long_conversation(tokens)
        rows = divide(batch, max_tokens=100, share_prefixes=True, in_pieces=True)
        assert len(rows) > tokens / 100
        looked_up.clear()
        with monkeypatch.context() as patched:
            patched.setattr(prefix_tree, "np", Counting())
            laid = lay_out(batch, rows)
        ends = sum(len(micro.layout.last_ends) for micro in laid)
        costs.append((sum(looked_up) / tokens, ends / tokens))
    early, late = costs
    assert late[0] < 1.5 * early[0]
    assert late[1] < 1.1 * early[1]
