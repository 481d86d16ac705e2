"""Two updates of each class by each transport, in a vLLM for GPUs, as JSON.

    python -m tests.gpu.updates FILE [CLASS …]

The classes of models and vLLM's loader are those for CUDA; the tensors are on the CPU, and what
carries them (CUDA's handles, NCCL) is replaced. CUDA graphs hold the addresses of weights, so an
update must leave every tensor where it is, with what a fresh load of the same weights gives.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import closing, contextmanager, nullcontext
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch

from tests.gpu.decisions import Facts, _answer
from tests.gpu.posing import pose

CUDA = torch.device("cuda:0")
MESSAGE_BYTES = 1 << 14
"""So small that layers are in several messages."""


def main(out: Path, *titles: str) -> None:
    """`titles`: only these classes of docs/models.md."""
    pose()
    _without_a_card()
    import_module("vllm.plugins").load_general_plugins()
    vllm: Any = import_module("tests.gpu.vllm_on_gpu")
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for architecture in vllm.TRAINED:
            if titles and architecture.title not in titles:
                continue
            path = Path(folder, architecture.kind)
            found[architecture.title] = _answer(partial(_updated, architecture, path))
            out.write_text(json.dumps(found, indent=1))


def _without_a_card() -> None:
    """Replaces what asks or uses the card itself."""
    accelerator: Any = torch.accelerator
    accelerator.empty_cache = lambda: None
    accelerator.max_memory_allocated = lambda *_: 0
    accelerator.current_device_index = lambda: 0
    cuda: Any = torch.cuda
    cuda.Stream = MagicMock
    cuda.current_stream = cuda.Stream
    cuda.stream = nullcontext
    cuda.synchronize = lambda *_: None
    cuda.current_device = lambda: torch.device("cpu")
    move = torch.Tensor.to

    def to(tensor: torch.Tensor, *where: Any, **named: Any) -> torch.Tensor:
        on_card = bool(where) and isinstance(where[0], torch.device) and where[0].type == "cuda"
        return tensor.clone() if on_card else move(tensor, *where, **named)

    torch.Tensor.to = to  # type: ignore[method-assign, assignment]
    empty: Any = torch.empty

    def allocated(*sizes: Any, device: Any = None, **named: Any) -> torch.Tensor:
        made: torch.Tensor = empty(*sizes, device=None if device == CUDA else device, **named)
        return made

    torch.empty = allocated
    parallel: Any = import_module("vllm.distributed.parallel_state")
    with tempfile.NamedTemporaryFile() as store:
        parallel.init_distributed_environment(1, 0, f"file://{store.name}-store", 0, backend="gloo")


def _updated(architecture: Any, folder: Path) -> dict[str, Any]:
    """Transport → what is wrong after two updates; empty: nothing."""
    vllm: Any = import_module("tests.gpu.vllm_on_gpu")
    export: Any = import_module("trainer.policy.export")
    folders = [folder / str(number) for number in range(3)]
    models = [vllm.written(architecture, path, seed) for seed, path in enumerate(folders)]
    weights = [
        [(name, tensor.clone()) for name, tensor in export.checkpoint_tensors(model)]
        for model in models
    ]
    config = vllm.configured(vllm.arguments(folders[0], "bfloat16"))
    import_module("vllm.distributed.parallel_state").destroy_model_parallel()
    live = _loaded(config)
    fresh = [
        dict(_tensors(_loaded(vllm.configured(vllm.arguments(path, "bfloat16")))))
        for path in folders[1:]
    ]
    return {
        name: _answer(partial(_wrong, config, live, weights[1:], fresh, send))
        for name, send in TRANSPORTS.items()
    }


def _wrong(config: Any, live: Any, weights: Any, fresh: Any, send: Any) -> Facts:
    before = _addresses(live)
    wrong: list[str] = []
    with import_module("vllm.config").set_current_vllm_config(config), torch.no_grad():
        for number, (sent, expected) in enumerate(zip(weights, fresh, strict=True), 1):
            with send(config, live) as update:
                update(sent)
            moved = _addresses(live).items() - before.items()
            wrong += [f"{name} moved in update {number}" for name, _ in sorted(moved)]
            wrong += [
                f"{name} differs in update {number}"
                for name, tensor in _tensors(live)
                if not torch.equal(tensor, expected[name])
            ]
    return {"wrong": wrong[:6]}


def _loaded(config: Any) -> Any:
    """The model as a worker loads it."""
    config.device_config.device = torch.device("cpu")
    with import_module("vllm.config").set_current_vllm_config(config):
        import_module("vllm.distributed.parallel_state").ensure_model_parallel_initialized(1, 1)
        config.compilation_config.static_forward_context.clear()
        return import_module("vllm.model_executor.model_loader").get_model(vllm_config=config)


def _tensors(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _addresses(model: Any) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in _tensors(model)}


@contextmanager
def _by_shm(config: Any, model: Any) -> Iterator[Any]:
    ours: Any = import_module("trainer.weight_sync.vllm_engine")
    segment: Any = import_module("trainer.weight_sync.segment")
    engine = ours.SharedMemoryEngine(config.weight_transfer_config, config, CUDA, model)
    with closing(segment.SegmentWriter()) as writer:

        def update(weights: Any) -> None:
            sent = writer.write(weights)
            update = ours.SharedMemoryUpdate(sent.path, sent.size_bytes, sent.digest)
            engine.start_weight_update()
            engine.receive_weights(update)
            engine.finish_weight_update()

        yield update
    engine.shutdown()


@contextmanager
def _by_gloo(config: Any, model: Any) -> Iterator[Any]:
    """What has arrived is loaded as on a card; how it arrives is the same on a CPU."""
    ours: Any = import_module("trainer.extras.gloo.engine")
    group: Any = import_module("trainer.extras.gloo.group")
    engine = ours.GlooEngine(config.weight_transfer_config, config, CUDA, model)

    def update(weights: Any) -> None:
        staged, reason = engine._loaded(group.ReceivedWeights(weights, "digest"))
        assert "no memory for a second model" in reason
        engine._staged = Future[Any]()
        engine._staged.set_result(staged)
        engine.start_weight_update()
        engine.receive_weights(ours.GlooUpdate("digest"))
        engine.finish_weight_update()

    yield update
    engine.shutdown()


@contextmanager
def _by_nccl(config: Any, model: Any) -> Iterator[Any]:
    theirs: Any = import_module("vllm.distributed.weight_transfer.nccl_engine")
    ours: Any = import_module("trainer.weight_sync.nccl_engine")
    engine = ours.CheckedNcclEngine(config.weight_transfer_config, config, CUDA, model)
    engine.packed_buffer_size_bytes = MESSAGE_BYTES

    def update(weights: Any) -> None:
        engine.model_update_group = _Communicator(weights)
        engine.start_weight_update()
        engine.receive_weights(theirs.NCCLWeightTransferUpdateInfo(**_described(weights)))
        engine.finish_weight_update()

    yield update


class _Communicator:
    """A worker's communicator, to which the trainer sends what vLLM's trainer packs."""

    disabled = False

    def __init__(self, weights: Any) -> None:
        self.group = SimpleNamespace(store=SimpleNamespace(check=lambda _: False))
        self._weights = iter(weights)

    def broadcast(self, tensor: torch.Tensor, src: int) -> None:
        pack: Any = import_module("vllm.distributed.weight_transfer.packed_tensor").pack_tensors
        tensor.copy_(pack(self._weights, lambda each: each[1], MESSAGE_BYTES).packed_tensor)


def _described(weights: Any) -> dict[str, Any]:
    return {
        "names": [name for name, _ in weights],
        "dtype_names": [str(tensor.dtype).removeprefix("torch.") for _, tensor in weights],
        "shapes": [list(tensor.shape) for _, tensor in weights],
    }


TRANSPORTS = {"shm": _by_shm, "gloo": _by_gloo, "nccl": _by_nccl}

if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
