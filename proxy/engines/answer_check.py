"""Validates the answers of engines.

Every chunk of every engine passes an `AnswerCheck` before anything is recorded or sent. Invariant:
a checked answer can be recorded and trained. Each id is in the vocabulary and has one
log-probability; there are at most `max_tokens` ids; one finish reason ends the answer; the version
spans, if the engine reports any, cover the answer without gap or overlap; and alternatives and
routed experts, if it reports any, are those of every requested token.
"""

from __future__ import annotations

import math

import numpy as np

from proxy.engines.protocol import Chunk, Sampling
from proxy.errors import EngineError
from proxy.records import Alternatives, FinishReason, VersionSpan

MAX_LOGPROB = 1e-3
"""A log-probability is at most 0. Engines compute the normaliser in float32, or round to bfloat16
before, so that the result for a probability near 1 can be slightly above 0."""
MIN_LOGPROB = -104.0
"""Engines sample from probabilities in float32, of which the least above 0 is 1.4e-45 = e^-103.28:
a token with a smaller one is never sampled."""
MAX_VERSION = 2**31 - 1
"""Versions are recorded as int32."""


class AnswerCheck:
    """Checks the chunks of one call, in order."""

    def __init__(
        self,
        sampling: Sampling,
        *,
        vocab_size: int,
        text_only: bool = False,
        prompt_tokens: int = 0,
    ) -> None:
        """`text_only`: the engine does not report token ids, and each log-probability is NaN."""
        self._max_tokens = sampling.max_tokens
        self._alternatives = sampling.alternatives
        self._rows_before = prompt_tokens - 1 - (sampling.experts_from or 0)
        self._vocab_size = vocab_size
        self._text_only = text_only
        self._tokens = 0
        self._finished = False

    def take(self, chunk: Chunk) -> Chunk:
        """Returns the chunk unchanged.

        Raises:
            EngineError: 502, the engine's answer is invalid; the message gives the reason.
        """
        if self._finished:
            raise _nonsense("sent tokens or a second finish reason after its finish reason")
        self._check_tokens(chunk)
        self._tokens += len(chunk.ids)
        if self._tokens > self._max_tokens:
            raise _nonsense(f"sent {self._tokens} tokens, but max_tokens is {self._max_tokens}")
        if chunk.finish_reason is not None:
            self._finished = True
            if chunk.finish_reason is not FinishReason.CUT:
                _check_versions(chunk.versions, self._tokens)
                self._check_experts(chunk)
        return chunk

    def _check_tokens(self, chunk: Chunk) -> None:
        ids, logprobs, tops = chunk.ids, chunk.logprobs, chunk.top_logprobs
        if len(ids) != len(logprobs):
            raise _nonsense(f"sent {len(ids)} tokens and {len(logprobs)} log-probabilities")
        if len(ids) != 1 or not self._is_valid(ids[0], logprobs[0]):
            self._check_ids(ids)
            self._check_logprobs(logprobs)
        if chunk.alternatives is not None:
            self._check_alternatives(chunk.alternatives, len(ids))
        if tops is None:
            return
        if len(tops) != len(ids):
            raise _nonsense(f"sent {len(ids)} tokens and alternatives of {len(tops)}")
        self._check_ids([token for top in tops for token, _ in top])
        for value in (value for top in tops for _, value in top):
            if not value <= MAX_LOGPROB:
                raise _nonsense(f"sent the log-probability {value} of an alternative, which is > 0")

    def _is_valid(self, token: int, logprob: float) -> bool:
        """The check of the usual chunk of a stream, which has one token."""
        bounded = MIN_LOGPROB <= logprob <= MAX_LOGPROB  # not for NaN
        return bounded and 0 <= token < self._vocab_size and not self._text_only

    def _check_alternatives(self, rows: Alternatives, tokens: int) -> None:
        if rows.shape != (tokens, self._alternatives):
            raise _nonsense(
                f"sent alternatives of the shape {list(rows.shape)}, expected "
                f"{[tokens, self._alternatives]}"
            )
        reported = rows[rows["logprob"] != -np.inf]
        self._check_ids(reported["id"].tolist())
        if not (reported["logprob"] <= MAX_LOGPROB).all():
            raise _nonsense("sent an alternative whose log-probability is not a number ≤ 0")

    def _check_experts(self, chunk: Chunk) -> None:
        rows, expected = chunk.routed_experts, self._rows_before + self._tokens
        if rows is not None and len(rows) != expected:
            raise _nonsense(f"sent routed experts of {len(rows)} tokens, expected {expected}")

    def _check_ids(self, ids: list[int]) -> None:
        if not ids or (min(ids) >= 0 and max(ids) < self._vocab_size):
            return
        wrong = next(token for token in ids if not 0 <= token < self._vocab_size)
        raise _nonsense(
            f"sent the token id {wrong}, and the vocabulary is 0 to {self._vocab_size - 1}"
        )

    def _check_logprobs(self, logprobs: list[float]) -> None:
        if self._text_only:
            wrong = [value for value in logprobs if not math.isnan(value)]
        elif _all_within_bounds(logprobs):
            return
        else:
            wrong = [value for value in logprobs if not MIN_LOGPROB <= value <= MAX_LOGPROB]
        if wrong:
            raise _nonsense(
                f"sent the log-probability {wrong[0]} of a sampled token, which is not between "
                f"{MIN_LOGPROB:g} and 0"
            )


def _all_within_bounds(logprobs: list[float]) -> bool:
    """`min` and `max` may pass over a NaN; the sum of values that include a NaN is NaN."""
    if not logprobs:
        return True
    bounded = min(logprobs) >= MIN_LOGPROB and max(logprobs) <= MAX_LOGPROB
    return bounded and not math.isnan(sum(logprobs))


def _check_versions(spans: tuple[VersionSpan, ...], tokens: int) -> None:
    """Checks the spans, if there are any. (`Generation` adds missing ones.)"""
    end = 0
    for span in spans:
        if not 0 <= span.version <= MAX_VERSION:
            raise _nonsense(f"sent the weight version {span.version}, which is not an int32 ≥ 0")
        if span.start != end or span.end <= span.start:
            raise _nonsense(f"sent the version span [{span.start}, {span.end}) after token {end}")
        end = span.end
    if spans and end != tokens:
        raise _nonsense(f"sent version spans of {end} tokens for an answer of {tokens}")


def _nonsense(words: str) -> EngineError:
    return EngineError(f"the engine {words}", status=502)
