"""The `nccl` backend with a stand-in for NCCL and for CUDA's streams.

As NCCL does, an operation of the stand-in waits for ever if a member of the group is lost; only its
own member's abort ends it. Reading a message before its stream has finished is an error.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.trainer.fake_engine import FakeEngine, serving
from tests.trainer.weight_sync.test_twin import Model, load, weights
from trainer.errors import WeightSyncError
from trainer.weight_sync import nccl_abort, transports
from trainer.weight_sync.control import EngineControl
from trainer.weight_sync.transports import VllmTransport

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]  # vLLM's own

FOR_EVER_S = 60.0
"""Longer than any test waits."""


class Stream:
    """A CUDA stream: its operations are done when `synchronize` returns."""

    def __init__(self) -> None:
        self.pending: list[Callable[[], None]] = []
        self.synchronized = 0

    def synchronize(self) -> None:
        self.synchronized += 1
        while self.pending:
            self.pending.pop(0)()


class Store:
    """The store of the group, in the trainer's process."""

    def __init__(self) -> None:
        self.keys: set[str] = set()
        self.is_lost = False

    def set(self, key: str, _: str) -> None:
        self.keys.add(key)

    def check(self, keys: list[str]) -> bool:
        if self.is_lost:
            raise RuntimeError("connection closed")
        return self.keys.issuperset(keys)


class Communicator:
    """A member's `PyNcclCommunicator`."""

    def __init__(self, streams: Streams, store: Store, messages: list[torch.Tensor] | None) -> None:
        """`messages`: what the trainer sends; None: this is the trainer, and nobody receives."""
        self.group = SimpleNamespace(store=store)
        self.disabled = False
        self._streams, self._messages = streams, messages
        self._aborted = threading.Event()

    def broadcast(self, tensor: torch.Tensor, src: int = 0, stream: Any = None) -> None:
        if self.disabled:
            return
        message = self._messages.pop(0) if self._messages else None

        def run() -> None:
            if message is not None:
                tensor.copy_(message)
            elif not self._aborted.wait(FOR_EVER_S):
                raise AssertionError("it hangs")

        self._streams.current.pending.append(run)

    def destroy(self) -> None:
        self._aborted.set()
        self.disabled = True


class Streams:
    """Stands for `torch.cuda`, as far as packed broadcasts use it."""

    def __init__(self) -> None:
        self.all = (Stream(), Stream())
        self.current = Stream()
        self.devices: list[torch.device] = []

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        self.devices.append(device)
        yield


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    from vllm.distributed.weight_transfer import packed_tensor

    found = Streams()
    monkeypatch.setattr(packed_tensor, "_get_streams", lambda *_: found.all)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(torch.cuda, "stream", found.stream)
    monkeypatch.setattr(torch.cuda, "device", found.device)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: found.current)
    return found


class Refusing(FakeEngine):
    """Refuses an update, or dies in it."""

    dies = False

    def answer(self, path: str, body: dict[str, Any]) -> dict[str, object]:
        if path == "/update_weights":
            if self.dies:
                self.is_dead = True
                self.released.wait(FOR_EVER_S)
            return {"error": "the update did not contain these weights"}
        return super().answer(path, body)


@pytest.mark.parametrize("dies", [False, True])
def test_engine_that_refuses_or_dies_ends_the_trainers_broadcast(
    streams: Streams, monkeypatch: pytest.MonkeyPatch, dies: bool
) -> None:
    from vllm.distributed.weight_transfer import nccl_engine

    store = Store()
    communicator = Communicator(streams, store, None)
    monkeypatch.setattr(nccl_engine, "open_trainer_endpoint", lambda _: communicator)
    monkeypatch.setattr(transports, "LOST_S", 0.0)
    engine = Refusing()
    engine.dies = dies
    with serving(engine) as (_, url):
        transport = VllmTransport(EngineControl([url]), "nccl", torch.device("cuda:3"))
        named = weights(1)
        transport.stage(named, lambda: named)
        why = "the engine died while" if dies else "did not contain these weights"
        with pytest.raises(WeightSyncError, match=why):
            transport.send()
        transport.close()
    assert nccl_abort.ABORTED in store.keys
    assert set(streams.devices) == {torch.device("cuda:3")}


def test_engine_that_dies_before_it_has_joined_ends_the_wait_for_it(
    streams: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.distributed.weight_transfer import nccl_engine

    ended = threading.Event()
    monkeypatch.setattr(nccl_engine, "open_trainer_endpoint", lambda _: ended.wait(FOR_EVER_S))

    class Dying(FakeEngine):
        def answer(self, path: str, body: dict[str, Any]) -> dict[str, object]:
            self.is_dead = path == "/init_weight_transfer_engine" or self.is_dead
            return {"error": "died"} if self.is_dead else super().answer(path, body)

    with serving(Dying()) as (_, url), pytest.raises(WeightSyncError, match="died"):
        VllmTransport(EngineControl([url]), "nccl", torch.device("cuda:0"))
    ended.set()


def worker(communicator: Communicator) -> Any:
    from trainer.weight_sync.nccl_engine import CheckedNcclEngine

    settings = SimpleNamespace()
    model = SimpleNamespace(hf_config=settings, hf_text_config=settings, dtype=torch.float32)
    config = SimpleNamespace(parallel_config=None, model_config=model)
    engine = CheckedNcclEngine(None, config, torch.device("cpu"), Model())
    engine.packed_buffer_size_bytes = 100  # three messages
    engine.model_update_group = communicator
    return engine


def update(named: list[Any]) -> Any:
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferUpdateInfo

    return NCCLWeightTransferUpdateInfo(
        [name for name, _ in named],
        ["float32"] * len(named),
        [list(tensor.shape) for _, tensor in named],
    )


def messages(named: list[Any], size: int = 100) -> list[torch.Tensor]:
    """What vLLM's trainer packs."""
    packed: list[list[torch.Tensor]] = [[]]
    for _, tensor in named:
        packed[-1].append(tensor.contiguous().view(-1).view(torch.uint8))
        if sum(each.numel() for each in packed[-1]) > size:
            packed.append([])
    return [torch.cat(each) for each in packed if each]


def test_messages_are_loaded_only_after_their_stream_has_finished(streams: Streams) -> None:
    named = weights(2)
    engine = worker(Communicator(streams, Store(), messages(named)))
    engine.receive_weights(update(named))
    engine.finish_weight_update()
    expected = Model()
    load(expected, named)
    assert torch.equal(engine.model.output(), expected.output())


def test_a_message_that_is_read_before_its_stream_has_finished_is_seen(
    streams: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the stand-in is for: without the wait, the worker loads what no message has brought."""
    named = weights(2)
    engine = worker(Communicator(streams, Store(), messages(named)))
    monkeypatch.setattr(Stream, "synchronize", lambda self: None)
    engine.receive_weights(update(named))
    engine.finish_weight_update()
    expected = Model()
    load(expected, named)
    assert not torch.equal(engine.model.output(), expected.output())


@pytest.mark.parametrize("lost", ["trainer", "another worker"])
def test_lost_member_ends_what_a_worker_waits_for_and_the_next_update_is_complete(
    streams: Streams, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    monkeypatch.setattr(nccl_abort, "LOOK_S", 0.01)
    store, named = Store(), weights(2)
    engine = worker(Communicator(streams, store, messages(named)[:1]))
    if lost == "trainer":
        store.is_lost = True
    else:
        store.set(nccl_abort.ABORTED, "")
    with pytest.raises(RuntimeError, match="a member of its group was lost"):
        engine.receive_weights(update(named))
    engine.model_update_group = Communicator(streams, Store(), messages(named))
    engine.receive_weights(update(named))
    engine.finish_weight_update()
    expected = Model()
    load(expected, named)
    assert torch.equal(engine.model.output(), expected.output())


def test_update_without_a_weight_is_refused(streams: Streams) -> None:
    named = weights(2)[:2]
    engine = worker(Communicator(streams, Store(), messages(named)))
    with pytest.raises(ValueError, match="only a part of these layers"):
        engine.receive_weights(update(named))


def test_plug_in_takes_the_place_of_vllms_own_engine() -> None:
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    from trainer.weight_sync.vllm_plugin import register_backends

    register_backends()
    register_backends()
    assert WeightTransferEngineFactory._registry["nccl"]().__name__ == "CheckedNcclEngine"
