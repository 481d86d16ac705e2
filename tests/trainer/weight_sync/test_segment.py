"""Shared memory: tensors are read back equal, and changing a bit changes the digest."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.weight_sync.segment import SegmentReader, SegmentWriter, digest, open_segment, read

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8]


@st.composite
def named_tensors(draw: st.DrawFn) -> list[tuple[str, torch.Tensor]]:
    shapes = draw(st.lists(st.lists(st.integers(0, 9), max_size=3), min_size=1, max_size=6))
    return [
        (f"layer.{i}.weight", (torch.randn(shape) * 50).to(draw(st.sampled_from(DTYPES))))
        for i, shape in enumerate(shapes)
    ]


@settings(max_examples=50, deadline=None)
@given(named_tensors())
def test_reader_receives_exactly_what_was_written(
    tensors: list[tuple[str, torch.Tensor]],
) -> None:
    writer = SegmentWriter()
    written = writer.write(tensors)
    got = read(open_segment(written.path, written.size_bytes))
    assert [name for name, _ in got] == [name for name, _ in tensors]
    for (_, ours), (_, theirs) in zip(tensors, got, strict=True):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)
    assert digest(got) == written.digest == digest(tensors)
    writer.close()


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 40_000), st.data())
def test_changing_any_bit_changes_the_digest(count: int, data: st.DataObject) -> None:
    tensor = torch.randn(count)
    before = digest([("w", tensor)])
    at, bit = data.draw(st.integers(0, count - 1)), data.draw(st.integers(0, 31))
    tensor.view(torch.int32)[at] ^= torch.tensor(1 << bit, dtype=torch.int64).to(torch.int32)
    assert digest([("w", tensor)]) != before


@settings(max_examples=50, deadline=None)
@given(st.integers(2, 20_000), st.data())
def test_exchanging_two_values_changes_the_digest(count: int, data: st.DataObject) -> None:
    tensor = torch.arange(count)
    before = digest([("w", tensor)])
    places = st.integers(0, count - 1)
    first, second = data.draw(st.lists(places, min_size=2, max_size=2, unique=True))
    tensor[[first, second]] = tensor[[second, first]]
    assert digest([("w", tensor)]) != before


def test_digest_includes_names_and_shapes() -> None:
    tensor = torch.arange(6.0)
    assert digest([("a", tensor)]) != digest([("b", tensor)])
    assert digest([("a", tensor)]) != digest([("a", tensor.view(2, 3))])


def test_weight_that_is_not_contiguous_is_read_back_equal() -> None:
    writer = SegmentWriter()
    tensor = torch.arange(12.0).view(3, 4).t()
    written = writer.write([("w", tensor)])
    ((_, got),) = read(open_segment(written.path, written.size_bytes))
    assert torch.equal(got, tensor)
    assert written.digest == digest([("w", tensor)])
    writer.close()


def test_growing_model_is_written_to_the_same_segment() -> None:
    writer = SegmentWriter()
    writer.write([("w", torch.ones(10))])
    written = writer.write([("w", torch.full((100_000,), 2.0))])
    ((_, got),) = read(open_segment(written.path, written.size_bytes))
    assert torch.equal(got, torch.full((100_000,), 2.0))
    writer.close()


def test_another_process_reads_the_segment() -> None:
    writer = SegmentWriter()
    written = writer.write([("w", torch.arange(1000.0))])
    script = (
        "import sys; from trainer.weight_sync.segment import *; "
        "print(digest(read(open_segment(sys.argv[1], int(sys.argv[2])))))"
    )
    command = [sys.executable, "-c", script, written.path, str(written.size_bytes)]
    out = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert out.stdout.strip() == written.digest
    writer.close()


def test_memory_that_was_changed_after_the_write_is_refused() -> None:
    writer, reader = SegmentWriter(), SegmentReader()
    written = writer.write([("w", torch.zeros(1000))])
    ((_, got),) = reader.receive(written)
    got[999] = 1e-30
    with pytest.raises(ValueError, match="written to during the update"):
        reader.receive(written)
    writer.close()


def test_reader_follows_a_growing_writer_and_its_successor() -> None:
    reader = SegmentReader()
    for _ in range(2):
        writer = SegmentWriter()  # the second writer has the same path but other memory
        for size in (10, 1000, 100_000):
            tensor = torch.randn(size)
            ((_, got),) = reader.receive(writer.write([("w", tensor)]))
            assert torch.equal(got, tensor)
        writer.close()


def test_reader_maps_a_segment_once() -> None:
    writer, reader = SegmentWriter(), SegmentReader()
    addresses = {
        reader.receive(writer.write([("w", torch.randn(1000))]))[0][1].data_ptr() for _ in range(3)
    }
    assert len(addresses) == 1
    writer.close()


def test_memory_of_a_writer_that_has_ended_is_refused() -> None:
    writer, reader = SegmentWriter(), SegmentReader()
    written = writer.write([("w", torch.ones(4))])
    reader.receive(written)
    writer.close()
    with pytest.raises(FileNotFoundError):
        reader.receive(written)


def test_segment_is_freed_with_its_writer() -> None:
    writer = SegmentWriter()
    written = writer.write([("w", torch.ones(4))])
    writer.close()
    with pytest.raises(FileNotFoundError):
        open_segment(written.path, written.size_bytes)
