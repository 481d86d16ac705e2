"""What a vLLM worker reports about the types in which it holds weights: exactly what its model's
loader does with them, and the model is unchanged by the question."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from trainer.weight_sync.segment import Named

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]  # vLLM's own

SIZE = 4
Load = Callable[[Any, Any], None]


class Model(torch.nn.Module):
    """Holds `small` in bfloat16 and `large` in float32; `load` says what happens to each weight."""

    def __init__(self, **loads: Load) -> None:
        from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

        super().__init__()
        self.small = Parameter(torch.ones(2 * SIZE, SIZE, dtype=torch.bfloat16), False)
        self.large = Parameter(torch.ones(SIZE, SIZE), False)
        self.bias = Parameter(torch.ones(SIZE, SIZE, dtype=torch.bfloat16), False)
        """vLLM never moves tensors of this name to the device meta."""
        self.loads = loads
        record_metadata_for_reloading(self)

    def load_weights(self, named: Iterable[Named]) -> set[str]:
        for name, tensor in named:
            self.loads[name](self, tensor)
        return {"small", "large", "bias"}


def report(**loads: Load) -> list[str | None]:
    """What a worker with a Model reports about weights in float32 that are loaded like this."""
    from trainer.weight_sync.vllm_dtypes import observed

    model = Model(**loads)
    weights = [(name, torch.empty(SIZE, SIZE, device="meta")) for name in loads]
    found = list(observed(model, weights))
    assert all(parameter.eq(1).all() for parameter in model.parameters())
    assert not any(parameter.is_meta for parameter in model.parameters())
    return found


def into_small(model: Any, tensor: torch.Tensor) -> None:
    model.small.data.narrow(0, 0, SIZE).copy_(tensor)


def into_large(model: Any, tensor: torch.Tensor) -> None:
    model.large.data.copy_(tensor)


def nowhere(model: Any, tensor: torch.Tensor) -> None:
    pass


def test_type_is_that_of_the_tensor_into_which_a_weight_is_copied() -> None:
    found = report(a=into_small, b=into_large, c=nowhere)
    assert found == ["bfloat16", "float32", None]


def test_tensors_that_keep_their_contents_are_not_written_to() -> None:
    def into_bias(model: Any, tensor: torch.Tensor) -> None:
        model.bias.data.copy_(tensor)

    def first_element(model: Any, tensor: torch.Tensor) -> None:
        model.bias.data.fill_(tensor.flatten()[0].item())

    assert report(a=into_bias, b=first_element) == ["bfloat16", "float32"]


@pytest.mark.parametrize(
    ("held", "moved"),
    [
        ("bfloat16", lambda tensor: tensor.t().contiguous()),
        ("bfloat16", lambda tensor: tensor.to(torch.bfloat16) * 2),
        ("bfloat16", lambda tensor: tensor.to("cpu").chunk(2)[1].reshape(-1, 2).view(2, SIZE)),
        ("float32", lambda tensor: -tensor.exp()),
        ("float32", lambda tensor: tensor.contiguous().clone().mul_(2)),
        ("float32", lambda tensor: torch.cat([tensor, tensor])[:SIZE]),
        ("float32", lambda tensor: tensor.to(torch.float64)),
    ],
)
def test_weight_that_is_computed_with_is_not_rounded_before(
    held: str, moved: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    def load(model: Any, tensor: torch.Tensor) -> None:
        part = moved(tensor)
        model.small.data[: len(part)].copy_(part)

    assert report(a=load) == [held]


def test_weight_with_two_places_of_different_types_is_not_rounded() -> None:
    def into_both(model: Any, tensor: torch.Tensor) -> None:
        into_small(model, tensor)
        into_large(model, tensor)

    assert report(a=into_both) == ["float32"]


def test_weight_that_replaces_a_tensor_is_not_rounded() -> None:
    def register(model: Any, tensor: torch.Tensor) -> None:
        model.large = Parameter(tensor, False)

    assert report(a=register) == ["float32"]


def test_any_error_of_a_loader_is_a_report() -> None:
    """vLLM's executor would leave it in the queues of the other workers."""
    from vllm.config import VllmConfig

    from trainer.weight_sync.vllm_dtypes import held_dtypes

    model = Model()
    worker = SimpleNamespace(vllm_config=VllmConfig(), get_model=lambda: model)
    found = held_dtypes(worker, json.dumps([["a", "float32", [SIZE, SIZE]]]))
    assert found == {"error": "KeyError: 'a'"}
    assert not any(parameter.is_meta for parameter in model.parameters())


def test_every_worker_of_vllm_has_the_method() -> None:
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    from trainer.weight_sync import vllm_dtypes

    vllm_dtypes.install()
    assert WorkerWrapperBase.held_dtypes is vllm_dtypes.held_dtypes
    assert "held_dtypes" in WorkerWrapperBase().__dir__()
