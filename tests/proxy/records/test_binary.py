import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from proxy.records import (
    ALTERNATIVE,
    FinishReason,
    ForkCause,
    ImageSpan,
    Reward,
    Session,
    SessionKind,
    SessionStatus,
    Turn,
    TurnStatus,
    VersionSpan,
)
from proxy.records.binary import RecordFormatError, decode_record, encode_record


def experts() -> st.SearchStrategy[np.ndarray]:
    shapes = st.tuples(st.integers(0, 4), st.integers(1, 3), st.integers(1, 2))
    return st.one_of(arrays(np.uint8, shapes), arrays(np.uint16, shapes))


def alternatives() -> st.SearchStrategy[np.ndarray]:
    shapes = st.tuples(st.integers(0, 4), st.integers(1, 3))
    return arrays(ALTERNATIVE, shapes)


@st.composite
def turns(draw: st.DrawFn) -> Turn:
    sampled = draw(st.lists(st.integers(0, 2**31 - 1), max_size=20))
    floats = st.floats(-1e3, 0, width=32)
    return Turn(
        session_id="t",
        index=draw(st.integers(0, 100)),
        parent=draw(st.none() | st.integers(0, 100)),
        shared_tokens=draw(st.integers(0, 1000)),
        fork_cause=draw(st.none() | st.sampled_from(ForkCause)),
        prompt_ids=np.array(draw(st.lists(st.integers(0, 2**31 - 1))), np.int32),
        request_key=draw(st.binary(max_size=16)),
        sampling={"temperature": 1.0},
        sampled_ids=np.array(sampled, np.int32),
        logprobs=np.array([draw(floats) for _ in sampled], np.float32),
        versions=(VersionSpan(3, 0, len(sampled)),) if sampled else (),
        finish_reason=draw(st.none() | st.sampled_from(FinishReason)),
        status=draw(st.sampled_from(TurnStatus)),
        answer=draw(st.binary(max_size=30)),
        routed_experts=draw(st.none() | experts()),
        alternatives=draw(st.none() | alternatives()),
        request=draw(st.binary(max_size=30)),
        images=draw(st.sampled_from([(), (ImageSpan(3, 2, 9, "4aeb", "9f86", (1, 2, 4)),)])),
    )


@settings(max_examples=50, deadline=None)
@given(st.lists(turns(), max_size=4))
def test_record_survives_encoding_and_decoding_bit_for_bit(recorded: list[Turn]) -> None:
    session = Session("t", b"", SessionKind.TRAIN, SessionStatus.OPEN, 1.0, 2.0)
    session.rewards.append(Reward("verifier", 1.0, {"tests": 0.5}, turn=2, branch=True))

    decoded_session, decoded = decode_record(encode_record(session, recorded))

    assert decoded_session == session
    assert len(decoded) == len(recorded)
    for got, want in zip(decoded, recorded, strict=True):
        for name in ("prompt_ids", "sampled_ids", "logprobs", "routed_experts", "alternatives"):
            if getattr(want, name) is None:
                assert getattr(got, name) is None
                continue
            assert getattr(got, name).shape == getattr(want, name).shape
            assert getattr(got, name).tobytes() == getattr(want, name).tobytes()
            assert getattr(got, name).dtype == getattr(want, name).dtype
        assert got.images == want.images
        assert (got.versions, got.status, got.fork_cause) == (
            want.versions,
            want.status,
            want.fork_cause,
        )


def test_encoded_record_does_not_contain_the_key_digest() -> None:
    session = Session("t", b"secret-digest", SessionKind.TRAIN, SessionStatus.OPEN, 1.0, 2.0)
    assert b"secret-digest" not in encode_record(session, [])


@pytest.mark.parametrize("data", [b"", b"{}", b"\x83", b"\x00" * 30])
def test_invalid_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(RecordFormatError):
        decode_record(data)
