"""The `gloo` backend with engines whose workers are threads, and which load nothing: who has which
rank, what arrives, and what happens when a member is lost."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest
import torch

from tests.trainer.fake_engine import FakeEngine, serving
from trainer.errors import WeightSyncError
from trainer.extras.gloo import trainer as gloo_trainer
from trainer.extras.gloo.group import Description, GlooGroup, Meeting, receive, send
from trainer.weight_sync.control import EngineControl
from trainer.weight_sync.segment import Named, digest
from trainer.weight_sync.sync import WeightSync
from trainer.weight_sync.transports import VllmTransport

WORKERS = 2


class GlooEngine(FakeEngine):
    """An engine with WORKERS workers, which receive weights in threads and answer meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.groups: list[GlooGroup] = []
        self.receiving: list[Future[list[Named]]] = []
        """What each worker receives."""
        self.weights: list[list[Named]] = []
        """What each worker serves; nothing before the first update."""
        self.reason = ""
        """Why workers have not staged the weights."""
        self.bucket_bytes = 0
        self.dies_at: int | None = None
        """Number of messages after which the engine dies."""
        self._pool = ThreadPoolExecutor(WORKERS)

    def answer(self, path: str, body: dict[str, Any]) -> dict[str, object]:
        if path == "/init_weight_transfer_engine" and "weights" in body["init_info"]:
            described = body["init_info"]["weights"]
            self.receiving = [
                self._pool.submit(self._receive, each, described) for each in self.groups
            ]
        elif path == "/init_weight_transfer_engine":
            info = body["init_info"]
            self.leave()
            self.bucket_bytes = info["bucket_bytes"]
            if self.dies_at == 0:
                self.is_dead = True
                self.released.wait()
            self.groups = list(self._pool.map(lambda number: _join(info, number), range(WORKERS)))
        if path == "/update_weights":
            self.weights = [each.result() for each in self.receiving]
            assert body["update_info"] == {"digest": digest(self.weights[0])}
        return super().answer(path, body) | {"world_size": WORKERS}

    def leave(self) -> None:
        for group in self.groups:
            group.destroy()
        self.groups = []

    def close(self) -> None:
        self.leave()
        self._pool.shutdown()

    def _receive(self, group: GlooGroup, described: Description) -> list[Named]:
        mortal = group if self.dies_at is None else _Mortal(group, self.dies_at)
        try:
            received = receive(mortal, described, self.bucket_bytes)
            mortal.reasons(self.reason)
        except InterruptedError:
            self.is_dead = True
            raise
        except RuntimeError:
            group.destroy()  # or the other members would wait for this one
            raise
        return received.tensors


class _Mortal(GlooGroup):
    """A membership that ends after `left` messages."""

    def __init__(self, group: GlooGroup, left: int) -> None:
        self._whole, self._left = group, left

    def broadcast(self, tensor: torch.Tensor, src: int = 0) -> None:
        self._live()
        self._whole.broadcast(tensor, src)

    def digests(self, own: bytes) -> list[str]:
        self._live()
        return self._whole.digests(own)

    def reasons(self, own: str) -> list[str]:
        self._live()
        return self._whole.reasons(own)

    def _live(self) -> None:
        if self._left == 0:
            self._whole.destroy()
            raise InterruptedError
        self._left -= 1


def _join(info: dict[str, Any], number: int) -> GlooGroup:
    address, rank = info["master_address"], info["rank_offset"] + number
    return GlooGroup.join(address, info["master_port"], rank, info["world_size"])


def sync_with(*urls: str) -> WeightSync:
    return WeightSync(EngineControl(urls), "gloo")


@pytest.fixture(params=[64, 256, 1 << 20])
def sent_in_messages_of(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each tensor alone, some together, and all together."""
    monkeypatch.setattr(gloo_trainer, "BUCKET_BYTES", request.param)


@pytest.fixture
def engines(sent_in_messages_of: None) -> Iterator[list[tuple[GlooEngine, str]]]:
    with ExitStack() as stack:
        made = [stack.enter_context(serving(GlooEngine())) for _ in range(3)]
        yield made
        for engine, _ in made:
            engine.released.set()
            engine.close()


def weights(seed: int) -> list[Named]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"a.weight": (300, 70), "a.bias": (300,), "b.scale": (), "c.weight": (7, 5, 3)}
    made = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    made["c.weight"] = made["c.weight"].bfloat16().transpose(0, 1)  # not contiguous
    return list(made.items())


def shapes_of(named: list[Named]) -> list[Named]:
    return [(name, each.to("meta")) for name, each in named]


def test_every_worker_of_every_engine_receives_the_weights(
    engines: list[tuple[GlooEngine, str]],
) -> None:
    (first, first_url), (second, second_url), _ = engines
    sync = sync_with(first_url, second_url)
    for version in range(1, 4):
        sent = weights(version)
        sync.push(iter(sent), version, partial(shapes_of, sent))
        for worker in (*first.weights, *second.weights):
            assert digest(worker) == digest((n, each.contiguous()) for n, each in sent)
        assert isinstance(sync.transport, VllmTransport)
        assert sync.transport.engine.digests == (digest(first.weights[0]),) * (1 + 2 * WORKERS)
    assert [group.rank for group in first.groups + second.groups] == [1, 2, 3, 4]
    sync.close()


@pytest.mark.parametrize(
    ("held", "sent_as_bfloat16"),
    [
        ({"a.weight": "bfloat16"}, {"a.weight"}),  # keeps the bias in float32
        ({"a.weight": "bfloat16", "a.bias": "bfloat16"}, {"a.weight", "a.bias"}),
        ({}, set()),  # serves float32
        (None, set()),
    ],
)
def test_engines_of_different_types_receive_the_widest(
    engines: list[tuple[GlooEngine, str]],
    held: dict[str, str] | None,
    sent_as_bfloat16: set[str],
) -> None:
    (first, first_url), (second, second_url), _ = engines
    first.held, second.held = {"a.weight": "bfloat16", "a.bias": "bfloat16"}, held
    sync = sync_with(first_url, second_url)
    for version in (1, 2):
        trained = weights(version)
        sent = [(n, t.bfloat16() if n in sent_as_bfloat16 else t) for n, t in trained]
        report = sync.push(iter(trained), version, partial(shapes_of, trained))
        for worker in (*first.weights, *second.weights):
            assert digest(worker) == digest((n, each.contiguous()) for n, each in sent)
        assert report.size_bytes == sum(each.nbytes for _, each in sent)
    assert first.calls.count("/collective_rpc") == (1 if held is None else 2)
    sync.close()


def test_weights_are_read_one_by_one_while_they_are_sent_and_engines_sample(
    engines: list[tuple[GlooEngine, str]],
) -> None:
    engine, url = engines[0]
    sync = sync_with(url)
    sent = weights(1)

    def gathered() -> Iterator[Named]:
        for each in sent:
            assert engine.receiving, "it was read before it can be sent"
            assert "/sleep" not in engine.calls, "the engine was paused before it has the weights"
            yield each

    sync.push(gathered(), 1, lambda: shapes_of(sent))
    assert engine.calls.index("/sleep") < engine.calls.index("/start_weight_update")
    sync.close()


def test_reasons_for_not_staging_are_reported(engines: list[tuple[GlooEngine, str]]) -> None:
    (first, first_url), (_, second_url), _ = engines
    sync = sync_with(first_url, second_url)
    assert isinstance(sync.transport, VllmTransport)
    first.reason = "no memory for é" + "…" * 300  # longer than what is reported, in UTF-8
    sync.push(weights(1), 1)
    assert len(sync.transport.engine.unstaged) == WORKERS
    assert all(each.startswith("no memory for é…") for each in sync.transport.engine.unstaged)
    first.reason = ""
    sync.push(weights(2), 2)
    assert sync.transport.engine.unstaged == ()
    sync.close()


def test_engine_lost_in_an_update_ends_it_and_the_others_take_the_next_one(
    engines: list[tuple[GlooEngine, str]],
) -> None:
    """A replacement, or an engine that joins late, is in the group of the next connection."""
    (lost, lost_url), (survivor, url), (late, late_url) = engines
    sync = sync_with(lost_url, url)
    lost.dies_at = 1
    with pytest.raises(WeightSyncError, match=f"{lost_url}: the engine died while it received"):
        sync.push(weights(1), 1)
    sync.close()
    again = sync_with(url, late_url)
    again.push(weights(2), 2)
    for worker in (*survivor.weights, *late.weights):
        assert digest(worker) == digest((n, each.contiguous()) for n, each in weights(2))
    again.close()


def test_engines_take_weights_from_the_trainer_after_one_that_was_lost(
    engines: list[tuple[GlooEngine, str]],
) -> None:
    engine, url = engines[0]
    sync = sync_with(url)

    def dies() -> Iterator[Named]:
        yield weights(1)[0]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sync.push(dies(), 1, lambda: shapes_of(weights(1)))
    sync.close()  # as the kernel does for a killed trainer
    again = sync_with(url)
    again.push(weights(2), 2)
    assert digest(engine.weights[1]) == digest((n, each.contiguous()) for n, each in weights(2))
    again.close()


def test_engine_that_dies_before_it_has_joined_ends_the_connection(
    engines: list[tuple[GlooEngine, str]],
) -> None:
    (_, url), (dying, dying_url), _ = engines
    dying.dies_at = 0
    with pytest.raises(WeightSyncError, match=f"{dying_url}: the engine died while POST /init"):
        sync_with(url, dying_url)


def test_other_weights_than_were_sent_are_refused_by_the_worker_and_by_the_trainer() -> None:
    meeting = Meeting("127.0.0.1", 2)
    refused: list[str] = []

    def work() -> None:
        group = GlooGroup.join("127.0.0.1", meeting.port, 1, 2)
        with pytest.raises(ValueError, match="received weights have digest") as caught:
            # with another name, so it differs
            receive(group, {"names": ["a"], "dtype_names": ["float32"], "shapes": [[3]]})
        refused.append(str(caught.value))

    worker = threading.Thread(target=work)
    worker.start()
    with pytest.raises(RuntimeError, match=r"workers of ranks \[1\] received other weights"):
        send(meeting.group(), [("b", torch.zeros(3))])
    worker.join()
    assert refused


@pytest.mark.parametrize(
    "sizes",
    [[], [0], [0, 0, 5], [64], [1, 1, 1], [60, 60], [100, 1, 100], [63, 1, 64, 65, 0, 1], [300]],
)
@pytest.mark.parametrize("bucket_bytes", [64, 256, 1 << 20])
def test_tensors_are_sent_together_up_to_the_size_of_a_message(
    sizes: list[int], bucket_bytes: int
) -> None:
    sent = [(f"{at}", torch.full((size,), at, dtype=torch.uint8)) for at, size in enumerate(sizes)]
    meeting, messages = Meeting("127.0.0.1", 2), list[int]()

    def work() -> list[Named]:
        group = GlooGroup.join("127.0.0.1", meeting.port, 1, 2)
        names, shapes = [name for name, _ in sent], [[size] for size in sizes]
        dtypes = ["uint8"] * len(sizes)
        described: Description = {"names": names, "dtype_names": dtypes, "shapes": shapes}
        return receive(group, described, bucket_bytes).tensors

    class Counting(GlooGroup):
        def broadcast(self, tensor: torch.Tensor, src: int = 0) -> None:
            messages.append(len(tensor))
            super().broadcast(tensor, src)

    with ThreadPoolExecutor(1) as worker:
        received = worker.submit(work)
        group = meeting.group()
        group.__class__ = Counting
        send(group, sent, bucket_bytes)
        assert digest(received.result()) == digest(sent)
    assert all(size <= bucket_bytes or size in sizes for size in messages)
    assert 0 not in messages
    aligned = sum(-(-size // 64) * 64 for size in sizes)
    assert len(messages) == (aligned > 0) or aligned > bucket_bytes
