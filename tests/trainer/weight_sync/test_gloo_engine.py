"""The workers of one engine under `gloo`, in threads, with a small model: it is unchanged while
they receive weights, and no worker changes it if another one has not received them."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.trainer.weight_sync.test_twin import Model, load, weights
from trainer.extras.gloo.group import Description, GlooGroup, Meeting, send
from trainer.weight_sync.dtypes import dtype_name
from trainer.weight_sync.segment import Named

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]  # vLLM's own

WORKERS = 2
BUCKET_BYTES = 64


@dataclass
class Workers:
    """The workers of an engine, each with a model, and their trainer."""

    engines: list[Any]
    pool: ThreadPoolExecutor
    trainer: GlooGroup

    def connect(self) -> None:
        from trainer.extras.gloo.engine import GlooInit

        meeting = Meeting("127.0.0.1", 1 + WORKERS)
        info = GlooInit("127.0.0.1", meeting.port, 1, 1 + WORKERS, BUCKET_BYTES)
        joining = [self.pool.submit(each.init_transfer_engine, info) for each in self.engines]
        self.trainer = meeting.group()
        for each in joining:
            each.result()

    def announce(self, named: list[Named]) -> None:
        from trainer.extras.gloo.engine import GlooInit

        for each in self.engines:
            each.init_transfer_engine(GlooInit(weights=described(named)))

    def stage(self, named: list[Named]) -> tuple[str, list[str]]:
        """The digest of what was sent, and each worker's reason for not staging it."""
        self.announce(named)
        digest, *_ = send(self.trainer, named, BUCKET_BYTES)
        return digest, self.trainer.reasons("")[1:]

    def update(self, digest: str) -> list[BaseException | None]:
        """Each worker's error."""
        from trainer.extras.gloo.engine import GlooUpdate

        update = GlooUpdate(digest)
        updating = [self.pool.submit(each.receive_weights, update) for each in self.engines]
        return [each.exception() for each in updating]

    def outputs(self) -> list[torch.Tensor]:
        return [each.model.output() for each in self.engines]


def described(named: list[Named]) -> Description:
    return {
        "names": [name for name, _ in named],
        "dtype_names": [dtype_name(each.dtype) for _, each in named],
        "shapes": [list(each.shape) for _, each in named],
    }


def output_of(named: list[Named]) -> torch.Tensor:
    model = Model()
    load(model, named)
    return model.output()


@pytest.fixture
def make_workers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Workers]]:
    """Makes workers that agree as by vLLM's group of all workers."""
    from trainer.extras.gloo import engine as gloo_engine

    said: list[bool] = []
    barrier = threading.Barrier(WORKERS, timeout=60)

    def all_workers(received: bool) -> bool:
        said.append(received)
        barrier.wait()
        agreed = all(said)
        if barrier.wait() == 0:
            said.clear()
        barrier.wait()
        return agreed

    monkeypatch.setattr(gloo_engine, "_all_workers", all_workers)
    made: list[Workers] = []

    def make(lora_config: Any = None) -> Workers:
        settings = SimpleNamespace()
        model = SimpleNamespace(hf_config=settings, hf_text_config=settings, dtype=torch.float32)
        engines = []
        for rank in range(WORKERS):
            parallel = SimpleNamespace(data_parallel_index=0, world_size=WORKERS, rank=rank)
            config = SimpleNamespace(
                parallel_config=parallel,
                model_config=model,
                lora_config=lora_config,
                quant_config=None,
            )
            engine = gloo_engine.GlooEngine(None, config, torch.device("cpu"), Model())
            engines.append(engine)
        made.append(Workers(engines, ThreadPoolExecutor(WORKERS), None))  # type: ignore[arg-type]
        made[-1].connect()
        return made[-1]

    yield make
    for each in made:
        each.trainer.destroy()
        for engine in each.engines:
            engine.shutdown()
        each.pool.shutdown()


@pytest.fixture
def twin_memory(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[torch.Tensor]]:
    """The tensors of all twins that are made from now on."""
    from trainer.weight_sync import vllm_staging
    from trainer.weight_sync.vllm_twin import Twin

    tensors: list[weakref.ref[torch.Tensor]] = []

    class Watched(Twin):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            tensors.extend(map(weakref.ref, self._tensors.values()))

    monkeypatch.setattr(vllm_staging, "Twin", Watched)
    return tensors


def assert_freed(workers: Workers, memory: list[weakref.ref[torch.Tensor]]) -> None:
    for each in workers.engines:
        each._thread.submit(gc.collect).result()  # after the thread has discarded the twin
    assert memory
    assert [each() for each in memory if each() is not None] == []


def test_models_are_unchanged_until_the_update_and_then_have_exactly_the_weights(
    make_workers: Callable[..., Workers],
) -> None:
    workers = make_workers()
    for seed, expected in ((1, "it learns how from its first update"), (2, ""), (3, "")):
        before = workers.outputs()
        digest, reasons = workers.stage(weights(seed))
        assert reasons == [expected] * WORKERS
        assert all(map(torch.equal, before, workers.outputs()))
        assert workers.update(digest) == [None] * WORKERS
        assert all(torch.equal(each, output_of(weights(seed))) for each in workers.outputs())


def test_weights_without_a_twin_are_loaded_by_the_update(
    make_workers: Callable[..., Workers],
) -> None:
    workers = make_workers(lora_config=object())
    for seed in (1, 2):
        before = workers.outputs()
        digest, reasons = workers.stage(weights(seed))
        assert reasons == ["it serves LoRA adapters"] * WORKERS
        assert all(map(torch.equal, before, workers.outputs()))
        assert workers.update(digest) == [None] * WORKERS
        assert all(torch.equal(each, output_of(weights(seed))) for each in workers.outputs())


def test_no_worker_takes_over_weights_that_another_one_has_not_received(
    make_workers: Callable[..., Workers],
    twin_memory: list[weakref.ref[torch.Tensor]],
) -> None:
    workers = make_workers()
    digest, _ = workers.stage(weights(1))
    workers.update(digest)
    digest, _ = workers.stage(weights(2))
    discarded, workers.engines[1]._staged = (
        workers.engines[1]._staged,
        None,
    )  # as of a worker whose receiving has failed
    first, second = workers.update(digest)
    assert "another worker of this engine has not received the weights" in str(first)
    assert "no weights have been sent since the last update" in str(second)
    workers.engines[1]._thread.submit(discarded.result().twin.discard)
    assert_freed(workers, twin_memory)
    assert all(torch.equal(each, output_of(weights(1))) for each in workers.outputs())
    digest, _ = workers.stage(weights(3))
    assert workers.update(digest) == [None] * WORKERS
    assert all(torch.equal(each, output_of(weights(3))) for each in workers.outputs())


def test_other_weights_than_the_update_names_are_refused(
    make_workers: Callable[..., Workers],
    twin_memory: list[weakref.ref[torch.Tensor]],
) -> None:
    workers = make_workers()
    digest, _ = workers.stage(weights(1))
    workers.update(digest)
    workers.stage(weights(2))
    assert all(isinstance(each, ValueError) for each in workers.update(digest))
    assert_freed(workers, twin_memory)
    assert all(torch.equal(each, output_of(weights(1))) for each in workers.outputs())


def test_trainer_lost_while_it_sends_leaves_the_weights_and_the_next_one_updates_them(
    make_workers: Callable[..., Workers],
) -> None:
    workers = make_workers()
    digest, _ = workers.stage(weights(1))
    workers.update(digest)
    workers.announce(weights(2))
    workers.trainer.broadcast(weights(2)[0][1].view(torch.uint8))  # the first of three messages
    workers.trainer.destroy()
    failed = [each._staged.exception() for each in workers.engines]
    assert all(isinstance(each, RuntimeError) for each in failed)
    assert all(torch.equal(each, output_of(weights(1))) for each in workers.outputs())
    workers.connect()
    digest, reasons = workers.stage(weights(3))
    assert reasons == [""] * WORKERS
    assert workers.update(digest) == [None] * WORKERS
    assert all(torch.equal(each, output_of(weights(3))) for each in workers.outputs())


def test_trainer_lost_after_it_has_sent_everything_leaves_no_second_copy_of_the_weights(
    make_workers: Callable[..., Workers],
    twin_memory: list[weakref.ref[torch.Tensor]],
) -> None:
    workers = make_workers()
    digest, _ = workers.stage(weights(1))
    workers.update(digest)
    workers.announce(weights(2))
    send(workers.trainer, weights(2), BUCKET_BYTES)
    workers.trainer.destroy()
    failed = [each._staged.exception() for each in workers.engines]
    assert all(isinstance(each, RuntimeError) for each in failed)
    assert_freed(workers, twin_memory)
    workers.connect()
    digest, reasons = workers.stage(weights(3))
    assert reasons == [""] * WORKERS
    assert workers.update(digest) == [None] * WORKERS
    assert_freed(workers, twin_memory)
    assert all(torch.equal(each, output_of(weights(3))) for each in workers.outputs())


def test_weights_that_were_staged_and_never_sent_are_replaced(
    make_workers: Callable[..., Workers],
) -> None:
    workers = make_workers()
    digest, _ = workers.stage(weights(1))
    workers.update(digest)
    workers.stage(weights(2))
    digest, reasons = workers.stage(weights(3))
    assert reasons == [""] * WORKERS
    assert workers.update(digest) == [None] * WORKERS
    assert all(torch.equal(each, output_of(weights(3))) for each in workers.outputs())


def test_update_that_lacks_a_part_is_refused_and_the_next_one_is_complete(
    make_workers: Callable[..., Workers],
) -> None:
    workers = make_workers()
    digest, _ = workers.stage(weights(1))
    workers.update(digest)
    digest, reasons = workers.stage(weights(2)[:2])
    assert all("only a part of these layers" in each for each in reasons)
    assert all(isinstance(each, ValueError) for each in workers.update(digest))
    digest, _ = workers.stage(weights(3))
    assert workers.update(digest) == [None] * WORKERS
    assert all(torch.equal(each, output_of(weights(3))) for each in workers.outputs())
