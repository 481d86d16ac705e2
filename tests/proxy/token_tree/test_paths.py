"""The last prompt of a tree grows in place, and is the one that its turns' own tokens give."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.engines.last_prompts import LastPrompts
from proxy.records import EMPTY_IDS, Ids, ImageSpan
from proxy.token_tree import paths
from proxy.token_tree.paths import LastPrompt, prefix


@dataclass
class _Turn:
    parent: int | None
    shared_tokens: int
    prompt_ids: Ids
    sampled_ids: Ids
    images: tuple[ImageSpan, ...] = ()

    @property
    def path_tokens(self) -> int:
        return self.shared_tokens + len(self.prompt_ids) + len(self.sampled_ids)


def _ids(rng: np.random.Generator, size: int) -> Ids:
    return rng.integers(0, 1000, size, dtype=np.int32) if size else EMPTY_IDS


def _first(rng: np.random.Generator) -> _Turn:
    return _Turn(None, 0, _ids(rng, paths.MIN_TOKENS), _ids(rng, 5))


@settings(deadline=None, max_examples=200)
@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 900), st.integers(0, 40), st.booleans()),
        min_size=1,
        max_size=25,
    ),
    st.integers(0, 2**32 - 1),
)
def test_every_prompt_is_its_turns_own_tokens(
    steps: Sequence[tuple[int, int, int, bool]], seed: int
) -> None:
    """Whatever the turns extend, whether a placed turn is recorded or not, and whether somebody
    keeps its prompt. A prompt that was returned never changes."""
    rng = np.random.default_rng(seed)
    turns, last, kept = [_first(rng)], LastPrompt(), []
    for back, new, sampled, recorded in steps:
        at = max(0, len(turns) - 1 - back)
        suffix = _ids(rng, new)
        prompt = last.extended(turns, at, suffix)
        expected = prefix(turns, at, turns[at].path_tokens, suffix)
        assert np.array_equal(prompt, expected)
        if recorded:
            turns.append(_Turn(at, turns[at].path_tokens, suffix, _ids(rng, sampled)))
            kept.append((prompt, expected))
        del prompt
    assert all(np.array_equal(prompt, expected) for prompt, expected in kept)


def test_a_prompt_that_somebody_keeps_is_extended_in_place() -> None:
    """And an engine's route knows without comparing that the next one begins with it."""
    rng = np.random.default_rng(0)
    turns, last, sent = [_first(rng)], LastPrompt(), LastPrompts[str]()
    suffix = _ids(rng, 10)
    first = last.extended(turns, 0, suffix)
    sent.keep(first, "s", "first", 0)
    turns.append(_Turn(0, turns[0].path_tokens, suffix, _ids(rng, 20)))
    second = last.extended(turns, 1, _ids(rng, 30))
    assert first.base is not None
    assert second.base is first.base
    assert not second.flags.writeable
    assert sent.extended_by(second, "s") == (len(first), "first")
    assert len(sent) == first.base.nbytes  # what it holds, not what it shows


def test_nobody_keeps_a_buffer_but_who_keeps_a_prompt() -> None:
    """A session that is idle costs its own tokens only."""
    rng = np.random.default_rng(0)
    turns, last = [_first(rng)], LastPrompt()
    prompt = last.extended(turns, 0, _ids(rng, 10))
    buffer = last._buffer
    assert buffer is not None
    assert buffer() is not None
    del prompt
    gc.collect()
    assert buffer() is None


def test_prompts_of_one_buffer_that_do_not_begin_together_are_compared() -> None:
    """A part of a prompt is no beginning of it."""
    sent = LastPrompts[str]()
    buffer = np.arange(5000, dtype=np.int32)
    sent.keep(buffer[10:3000], "s", "part", 0)
    assert sent.extended_by(buffer[:4000], "s") is None
    assert sent.extended_by(buffer[10:4000], "s") == (2990, "part")
