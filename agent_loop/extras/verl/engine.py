"""An `Engine` of the proxy that samples with verl's rollout servers.

Invariant: every token has a log-probability and a version; otherwise the call is an error. verl
reports `completed` for every answer that it did not abort. Whether an answer was truncated is
therefore read from its ids: an answer that does not end with a stop is `length`.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Protocol

from proxy.engines.protocol import Chunk, EngineInfo, PreparedImage, Sampling, Take
from proxy.errors import EngineError
from proxy.records import FinishReason, Ids, VersionSpan

_NEUTRAL = {"presence_penalty": 0.0, "frequency_penalty": 0.0, "min_p": 0.0, "seed": None}


class TokenOutput(Protocol):
    """The attributes of verl's `TokenOutput` that are used here."""

    token_ids: list[int]
    log_probs: list[float] | None
    stop_reason: str | None
    extra_fields: dict[str, Any]


class ServerClient(Protocol):
    """verl's `LLMServerClient`, which sends calls with equal `request_id` to the same server."""

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any]
    ) -> TokenOutput: ...


class VerlEngine:
    """Implements `proxy.engines.protocol.Engine`. An answer is one chunk, because verl does not
    stream."""

    def __init__(
        self, client: ServerClient, *, end_ids: Collection[int], max_context_tokens: int
    ) -> None:
        """`end_ids`: the model's end-of-text and end-of-turn tokens."""
        self._client = client
        self._end_ids = frozenset(end_ids)
        self._info = EngineInfo(
            name="verl", url="verl://llm-server-client", max_context_tokens=max_context_tokens
        )

    @property
    def info(self) -> EngineInfo:
        return self._info

    async def generate(
        self,
        prompt_ids: Ids,
        sampling: Sampling,
        take: Take,
        *,
        request_id: str,
        cache_salt: str | None = None,
        stream: bool = True,
    ) -> None:
        session = request_id.rpartition("#")[0] or request_id
        self._info.in_flight += 1
        try:
            output = await self._client.generate(
                session, prompt_ids=prompt_ids.tolist(), sampling_params=sampling_params(sampling)
            )
        finally:
            self._info.in_flight -= 1
        take(self._chunk(output, sampling))

    async def abort(self, request_id: str) -> None:
        """Does nothing: verl's client cannot abort, so the answer is sampled to its end."""

    async def prepare(self, data: bytes, media_type: str) -> PreparedImage:
        raise EngineError("verl's servers prepare no images here", status=502)

    def forget(self, session_id: str) -> None:
        """Does nothing: nothing is kept of a session."""

    async def check(self) -> None:
        """Does nothing: verl checks its own servers."""

    async def close(self) -> None:
        """Does nothing: the servers belong to verl."""

    def _chunk(self, output: TokenOutput, sampling: Sampling) -> Chunk:
        ids, logprobs = output.token_ids, output.log_probs
        if logprobs is None or len(logprobs) != len(ids):
            given = "none" if logprobs is None else len(logprobs)
            raise EngineError(
                f"verl gave {len(ids)} tokens and {given} log-probabilities: "
                "set actor_rollout_ref.rollout.calculate_log_probs=True",
                status=502,
            )
        # The version of the oldest weights that sampled one of the tokens. verl reports no version
        # per token; with the oldest version, staleness is never underestimated.
        version = output.extra_fields.get("min_global_steps")
        if version is not None:
            self._info.version = max(self._info.version, int(version))
            self._info.reports_version = True
        return Chunk(
            ids=list(ids),
            logprobs=list(logprobs),
            top_logprobs=[[pair] for pair in zip(ids, logprobs, strict=True)]
            if sampling.top_logprobs
            else None,  # verl's servers report no other token
            finish_reason=self._finish(output, sampling),
            versions=(VersionSpan(int(version or 0), 0, len(ids)),) if ids else (),
        )

    def _finish(self, output: TokenOutput, sampling: Sampling) -> FinishReason:
        if output.stop_reason == "aborted":
            return FinishReason.CUT
        last = output.token_ids[-1] if output.token_ids else None
        ended = last in self._end_ids or last in sampling.stop_token_ids
        by_text = bool(sampling.stop) and len(output.token_ids) < sampling.max_tokens
        return FinishReason.STOP if ended or by_text else FinishReason.LENGTH


def sampling_params(s: Sampling) -> dict[str, Any]:
    """The parameters in the format of verl's servers. Neutral values are left out if not every
    server supports the parameter."""
    params: dict[str, Any] = {
        "max_tokens": s.max_tokens,
        "temperature": s.temperature,
        "top_p": s.top_p,
        "top_k": s.top_k,
        "repetition_penalty": s.repetition_penalty,
        "logprobs": True,
    }
    for name, neutral in _NEUTRAL.items():
        if (value := getattr(s, name)) != neutral:
            params[name] = value
    if s.stop:
        params["stop"] = list(s.stop)
    if s.stop_token_ids:
        params["stop_token_ids"] = list(s.stop_token_ids)
    if s.structured is not None:
        params["structured_outputs"] = s.structured
    return params
