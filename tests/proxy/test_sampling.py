"""What a session may pin, and what a turn records of its sampling."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from agent_loop.trajectory import build_segments, flatten
from proxy.client import ProxyClientError
from proxy.errors import RequestError
from proxy.records import Session, SessionKind, SessionStatus
from proxy.sampling import as_record, check_pinned, resolve
from proxy.wire.dialect import Options
from tests.agent_loop.recorded import turn
from tests.proxy.conftest import RunningProxy

BENT: list[dict[str, float]] = [
    {"min_p": 0.1},
    {"presence_penalty": 0.5},
    {"frequency_penalty": -0.5},
    {"repetition_penalty": 1.1},
]


@pytest.mark.parametrize("sampling", BENT, ids=str)
def test_what_cannot_be_trained_is_refused_by_name_in_training_only(
    sampling: dict[str, float],
) -> None:
    (name,) = sampling
    with pytest.raises(RequestError, match=rf"sampling\.{name}.*kind eval"):
        check_pinned({"temperature": 0.7, **sampling}, SessionKind.TRAIN)
    assert check_pinned(sampling, SessionKind.EVAL) == sampling
    plain = {"min_p": 0, "presence_penalty": 0.0, "frequency_penalty": 0, "repetition_penalty": 1.0}
    assert check_pinned(plain, SessionKind.TRAIN) == plain


@pytest.mark.parametrize("kind", SessionKind)
def test_temperature_below_the_engines_least_cannot_be_pinned(kind: SessionKind) -> None:
    """vLLM would sample at 0.01, and the trainer would compute with what was pinned."""
    with pytest.raises(RequestError, match=r"sampling\.temperature.*0\.01 instead of 0\.004"):
        check_pinned({"temperature": 0.004}, kind)
    for allowed in (0, 0.01, 1):
        assert check_pinned({"temperature": allowed}, kind) == {"temperature": allowed}


@pytest.mark.parametrize(("asked", "sampled"), [(0.0, 0.0), (1e-9, 0.01), (0.01, 0.01), (0.7, 0.7)])
def test_record_has_the_temperature_at_which_engines_sample(asked: float, sampled: float) -> None:
    session = Session("s", b"", SessionKind.EVAL, SessionStatus.OPEN, 1.0, 2.0)
    limits: dict[str, Any] = {"prompt_tokens": 3, "context_tokens": 100, "stop_token_ids": ()}
    found = resolve(session, Options(temperature=asked), **limits)
    assert found.temperature == sampled
    assert as_record(found)["temperature"] == sampled


async def test_proxy_creates_no_session_that_could_not_be_trained(proxy: RunningProxy) -> None:
    with pytest.raises(ProxyClientError, match="repetition_penalty"):
        await proxy.session(sampling={"repetition_penalty": 1.3})
    session = await proxy.session(SessionKind.EVAL, sampling={"repetition_penalty": 1.3})
    body = {"messages": [{"role": "user", "content": "Hi."}]}
    assert (await proxy.post(session, "chat/completions", body))[0] == 200


@pytest.mark.parametrize("pinned", [{"top_k": 5}, {"top_k": 20, "top_p": 0.9}], ids=str)
def test_alternatives_that_only_the_agent_requests_are_nothing_that_training_needs(
    pinned: dict[str, Any],
) -> None:
    """verl's servers report none: a trial whose agent requested some failed."""
    session = Session(
        "s", b"", SessionKind.TRAIN, SessionStatus.OPEN, 1.0, 2.0, sampling=dict(pinned)
    )
    limits: dict[str, Any] = {"prompt_tokens": 3, "context_tokens": 100, "stop_token_ids": ()}
    asked = resolve(session, Options(logprobs=True, top_logprobs=20), **limits)
    assert (asked.alternatives, asked.top_logprobs) == (20, 20)
    recorded = replace(turn(0, None, 0, [1, 2], [4, 5]), sampling=as_record(asked))
    (path,) = flatten(build_segments([recorded]))
    assert path.ids[path.mask].tolist() == [4, 5]
    assert np.isfinite(path.logprobs).all()
    session.sampling = {**pinned, "alternatives": 20}
    needed = resolve(session, Options(logprobs=True, top_logprobs=5), **limits)
    assert as_record(needed)["alternatives"] == 20
