"""Weights are sent in the type in which every engine holds them, and otherwise as trained."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.trainer.fake_engine import FakeEngine, serving
from trainer.weight_sync.control import EngineControl
from trainer.weight_sync.dtypes import agreed, engine_dtypes, rounded
from trainer.weight_sync.segment import Named, SegmentReader, Written
from trainer.weight_sync.sync import WeightSync

HELD = ("bfloat16", "float16", "float32", "float8_e4m3fn", None)


def shapes(dtype: torch.dtype = torch.float32) -> list[Named]:
    return [("w", torch.empty(3, dtype=dtype, device="meta"))]


@pytest.mark.parametrize(
    ("trained", "held", "expected"),
    [
        (torch.float32, ["bfloat16", "bfloat16"], {"w": torch.bfloat16}),
        (torch.float32, ["bfloat16", None], {"w": torch.bfloat16}),
        (torch.float32, [None, None], {}),
        (torch.float32, ["bfloat16", "float32"], {}),
        (torch.float32, ["bfloat16", "float16"], {}),
        (torch.float32, ["float8_e4m3fn"], {}),
        (torch.bfloat16, ["float32"], {}),
        (torch.bfloat16, ["float16"], {}),
        (torch.int32, ["bfloat16"], {}),
    ],
)
def test_only_a_narrower_type_of_all_workers_is_agreed(
    trained: torch.dtype, held: list[str | None], expected: dict[str, torch.dtype]
) -> None:
    assert agreed(shapes(trained), [[each] for each in held]) == expected


@given(st.lists(st.sampled_from(HELD), min_size=1, max_size=4), st.integers(0, 2**32 - 1))
def test_no_worker_holds_other_bits_than_of_the_trained_weight(
    held: list[str | None], bits: int
) -> None:
    trained = torch.tensor([bits], dtype=torch.uint32).view(torch.float32)
    sent = dict(rounded([("w", trained)], agreed(shapes(), [[each] for each in held])))["w"]
    for each in filter(None, held):
        dtype = getattr(torch, each)
        kept, wanted = (tensor.to(dtype).view(torch.uint8) for tensor in (sent, trained))
        assert trained.isnan().all() or torch.equal(kept, wanted)


class Reading(FakeEngine):
    """Keeps a copy of what arrives in shared memory."""

    received: tuple[Named, ...] = ()

    def answer(self, path: str, body: dict[str, Any]) -> dict[str, object]:
        if path == "/update_weights":
            arrived = SegmentReader().receive(Written(**body["update_info"]))
            self.received = tuple((name, each.clone()) for name, each in arrived)
        return super().answer(path, body)


@pytest.fixture
def engine() -> Iterator[tuple[Reading, str]]:
    with serving(Reading()) as made:
        yield made


def test_shared_memory_holds_the_types_of_the_engine(engine: tuple[Reading, str]) -> None:
    """An engine without `shapes` is not asked, and gets what it is given."""
    served, url = engine
    served.held = {"w": "bfloat16"}
    weights = [("w", torch.randn(5, 7).t()), ("A_log", torch.randn(3))]
    sync = WeightSync(EngineControl([url]))
    report = sync.push(weights, 1, lambda: [(name, each.to("meta")) for name, each in weights])
    (_, wide), (_, kept) = served.received
    assert torch.equal(wide, weights[0][1].bfloat16())
    assert torch.equal(kept, weights[1][1])
    assert report.size_bytes == 5 * 7 * 2 + 3 * 4
    assert sync.push(weights, 2).size_bytes == 5 * 7 * 4 + 3 * 4
    assert [each.dtype for _, each in served.received] == [torch.float32] * 2
    sync.close()


def _after(attributes: Any, answer: Any) -> Any:
    """Gives the answer to every question but that for the worker's attributes."""

    def report(method: str, arguments: Any) -> Any:
        return attributes(method, arguments) if method == "__dir__" else answer

    return report


@pytest.mark.parametrize("answer", [None, {"error": "KeyError: 'w'"}, ["bfloat16", "bfloat16"]])
def test_engine_that_reports_nothing_usable_gets_the_trained_weights(
    engine: tuple[Reading, str],
    answer: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    served, url = engine
    served.held = None if answer is None else {}
    monkeypatch.setattr(served, "_report", _after(served._report, answer))
    control = EngineControl([url])
    with caplog.at_level(logging.WARNING):
        assert engine_dtypes(control, shapes()) == {}
    assert "weights are sent as they are trained" in caplog.text
    control.close()
