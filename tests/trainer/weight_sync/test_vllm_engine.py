"""A worker under `shm`, with a small model: weights that it staged are served, or freed."""

from __future__ import annotations

import gc
import weakref
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.trainer.weight_sync.test_twin import Model, load, weights
from trainer.weight_sync.segment import SegmentWriter, Written

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]  # vLLM's own


def make_engine() -> Any:
    from trainer.weight_sync.vllm_engine import SharedMemoryEngine

    settings = SimpleNamespace()
    config = SimpleNamespace(
        parallel_config=None,
        model_config=SimpleNamespace(
            hf_config=settings, hf_text_config=settings, dtype=torch.float32
        ),
        lora_config=None,
        quant_config=None,
    )
    return SharedMemoryEngine(None, config, torch.device("cpu"), Model())


def stage(engine: Any, written: Written, report: str) -> None:
    from trainer.weight_sync.vllm_engine import SharedMemoryInit

    engine.init_transfer_engine(
        SharedMemoryInit(written.path, written.size_bytes, written.digest, report)
    )


def update(engine: Any, written: Written) -> None:
    from trainer.weight_sync.vllm_engine import SharedMemoryUpdate

    engine.receive_weights(SharedMemoryUpdate(written.path, written.size_bytes, written.digest))
    engine.finish_weight_update()


def test_staged_weights_that_the_update_does_not_name_are_freed() -> None:
    engine = make_engine()
    with closing(SegmentWriter()) as writer:
        update(engine, writer.write(weights(1)))  # learns how to stage
        stage(engine, writer.write(weights(2)), writer.report_path)
        memory = [*map(weakref.ref, engine._staged.result().twin._tensors.values())]
        assert memory
        update(engine, writer.write(weights(3)))
        engine._thread.submit(gc.collect).result()
        assert [each() for each in memory if each() is not None] == []
        expected = Model()
        load(expected, weights(3))
        assert torch.equal(engine.model.output(), expected.output())
        engine.shutdown()


def test_weights_that_cannot_be_staged_are_hashed_before_the_pause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As of every GPU, which has no memory for a second model."""
    engine = make_engine()
    engine._refusal = "its device is cuda"
    with closing(SegmentWriter()) as writer:
        written = writer.write(weights(2))
        stage(engine, written, writer.report_path)
        assert engine._staged.result().reason == "its device is cuda"

        def hashed(_: object) -> str:
            raise AssertionError("the weights are hashed while sampling is paused")

        monkeypatch.setattr("trainer.weight_sync.segment.digest", hashed)
        update(engine, written)
        expected = Model()
        load(expected, weights(2))
        assert torch.equal(engine.model.output(), expected.output())
        engine.shutdown()


def test_weights_that_were_changed_after_the_write_are_refused_by_the_update() -> None:
    engine = make_engine()
    engine._refusal = "its device is cuda"
    with closing(SegmentWriter()) as writer:
        written = writer.write(weights(2))
        wrong = Written(written.path, written.size_bytes, "0" * 32)
        stage(engine, wrong, writer.report_path)
        assert isinstance(engine._staged.exception(), ValueError)
        with pytest.raises(ValueError, match="the trainer sent 0000"):
            update(engine, wrong)
        engine.shutdown()
