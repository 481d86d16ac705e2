"""Weights that are staged in a twin: the model is unchanged before, and as reloaded by vLLM after;
a model whose twin would not have exactly the loaded weights is refused."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from trainer.weight_sync.segment import Named

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]  # vLLM's own

ROWS, COLUMNS = 6, 4
X = torch.randn(3, COLUMNS, generator=torch.Generator().manual_seed(1))


def packing(process: Callable[[Any, Any], None]) -> Any:
    """A method of vLLM's layers that packs weights by `process`."""
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

    members = {
        "create_weights": lambda self, layer: None,
        "apply": lambda self, layer, x: None,
        "process_weights_after_loading": process,
    }
    return type("Packing", (QuantizeMethodBase,), members)()


def keep_packed(method: Any, layer: Any) -> None:
    pack(layer, layer.weight.detach().clone())


def pack(layer: Any, packed: torch.Tensor) -> None:
    layer.scale.fill_(1)
    layer.unused = torch.tensor(1.0)
    layer.cpu_linear = lambda x, weight, bias: x @ packed.T
    layer.weight = Parameter(torch.empty(0), requires_grad=False)


class Fused(torch.nn.Module):
    """Two weights, one below the other, which are packed."""

    def __init__(self, process: Callable[[Any, Any], None] = keep_packed) -> None:
        super().__init__()
        self.weight = Parameter(torch.zeros(2 * ROWS, COLUMNS), requires_grad=False)
        self.register_buffer("scale", torch.ones(()))
        self.weight.weight_loader = self.load_part  # type: ignore[attr-defined]
        self.quant_method = packing(process)

    def load_part(self, param: Any, loaded: torch.Tensor, part: int) -> None:
        param.data[part * ROWS : (part + 1) * ROWS].copy_(loaded)


class Plain(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = Parameter(torch.zeros(ROWS), requires_grad=False)


class Model(torch.nn.Module):
    def __init__(self, process: Callable[[Any, Any], None] = keep_packed) -> None:
        from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

        super().__init__()
        self.norm, self.fused = Plain(), Fused(process)
        record_metadata_for_reloading(self)
        self.fused.quant_method.process_weights_after_loading(self.fused)
        load(self, weights(0))

    def load_weights(self, named: Iterable[Named]) -> set[str]:
        for name, tensor in named:
            if name == "norm":
                parameter = self.norm.weight
                getattr(parameter, "weight_loader", copy_whole)(parameter, tensor)
            else:
                parameter = self.fused.weight
                parameter.weight_loader(parameter, tensor, int(name))  # type: ignore[attr-defined]
        return {"norm.weight", "fused.weight"}

    def output(self) -> torch.Tensor:
        fused: Any = self.fused
        return torch.cat([fused.cpu_linear(X, fused.weight, None).flatten(), self.norm.weight])


class Direct(Model):
    """Its loader copies the norm past the loader of the parameter."""

    def load_weights(self, named: Iterable[Named]) -> set[str]:
        rest = dict(named)
        self.norm.weight.data.copy_(rest.pop("norm"))
        return super().load_weights(rest.items())


def copy_whole(param: Any, loaded: torch.Tensor) -> None:
    param.data.copy_(loaded)


def weights(seed: int) -> list[Named]:
    generator = torch.Generator().manual_seed(seed)
    parts = [(str(i), torch.randn(ROWS, COLUMNS, generator=generator)) for i in range(2)]
    return [("norm", torch.randn(ROWS, generator=generator)), *parts]


def load(model: torch.nn.Module, tensors: Iterable[Named]) -> None:
    from trainer.weight_sync.vllm_reload import Reload

    settings = SimpleNamespace()
    config = SimpleNamespace(hf_config=settings, hf_text_config=settings, dtype=torch.float32)
    reload = Reload(model, config, torch.device("cpu"))
    reload.load(tensors)
    reload.finish()


def learned(model: torch.nn.Module) -> Any:
    from trainer.weight_sync.vllm_twin import Observation, learn

    seen = Observation(model)
    with seen.watch():
        load(model, weights(1))
    return learn(model, seen, load, weights(1))


def test_model_is_unchanged_while_weights_are_staged_and_then_as_reloaded() -> None:
    from trainer.weight_sync.vllm_twin import Twin

    model, reloaded = Model(), Model()
    plan = learned(model)
    assert plan.written - plan.constant == {("norm", "weight")}
    assert plan.replaced - plan.constant == {("fused", "cpu_linear")}
    for seed in (2, 3):
        before = model.output()
        twin = Twin(model, plan)
        load(twin.model, weights(seed))
        assert torch.equal(model.output(), before)
        twin.adopt()
        twin.discard()
        load(reloaded, weights(seed))
        assert torch.equal(model.output(), reloaded.output())
        assert not torch.equal(model.output(), before)
    load(model, weights(4))  # vLLM's own load still reaches it
    load(reloaded, weights(4))
    assert torch.equal(model.output(), reloaded.output())


def test_discarded_twin_is_freed_without_the_garbage_collector() -> None:
    from trainer.weight_sync.vllm_twin import Twin

    model: Any = Model()
    twin = Twin(model, learned(model))
    load(twin.model, weights(2))
    replaced = weakref.ref(model.fused.cpu_linear)
    held: list[Any] = [weakref.ref(twin.model), replaced]
    held.append(weakref.ref(twin.model.norm.weight))
    twin.adopt()
    assert None not in [each() for each in held]
    gc.disable()
    try:
        twin.discard()
        twin.model = torch.nn.Module()
        assert [each() for each in held] == [None] * 3
    finally:
        gc.enable()


def test_part_of_the_weights_does_not_reach_the_model() -> None:
    from trainer.weight_sync.vllm_twin import Twin

    model = Model()
    plan = learned(model)
    before = model.output()
    with pytest.raises(ValueError, match="only a part"):
        load(Twin(model, plan).model, weights(2)[:2])
    assert torch.equal(model.output(), before)


def test_weights_that_are_packed_once_are_refused() -> None:
    """vLLM's tied output layers on CPU: a reload does not pack them again."""

    def pack_once(method: Any, layer: Any) -> None:
        if not hasattr(layer, "cpu_linear"):
            keep_packed(method, layer)
        layer.weight = Parameter(torch.empty(0), requires_grad=False)

    assert refusal(Model(pack_once)) == "a load changes nothing of ['fused']"


def test_packed_weights_of_another_layer_are_refused() -> None:
    """A method that refers to a layer of the model takes the old weights of that layer."""
    models: list[Model] = []

    def pack_both(method: Any, layer: Any) -> None:
        packed = layer.weight.detach().clone()
        if models:
            packed[0] = models[0].norm.weight[:COLUMNS]
        pack(layer, packed)

    models.append(Model(pack_both))
    assert refusal(models[0]) == "its twin gives fused.cpu_linear other values"


def test_transformed_weights_are_refused() -> None:
    def exponentiate(method: Any, layer: Any) -> None:
        pack(layer, layer.weight.detach().exp())

    assert refusal(Model(exponentiate)) == "its twin gives fused.cpu_linear other values"


def test_sizes_of_weights_are_refused() -> None:
    def measure(method: Any, layer: Any) -> None:
        size = layer.weight.abs().max()
        keep_packed(method, layer)
        layer.scale.copy_(size)

    assert refusal(Model(measure)) == "its twin gives fused.scale other values"


def test_derived_weights_outside_of_modules_are_refused() -> None:
    class Derived:
        __module__ = "vllm.attention"
        total: Any = None

    def derive(method: Any, layer: Any) -> None:
        layer.backend.total = layer.weight.sum()
        keep_packed(method, layer)

    model = Model()
    model.fused.backend = Derived()  # type: ignore[assignment]
    model.fused.quant_method = packing(derive)
    assert refusal(model) == "vLLM keeps derived weights in ['fused.backend.total']"


def refusal(model: Model) -> str:
    from trainer.weight_sync.vllm_twin import UnstageableError

    with pytest.raises(UnstageableError) as error:
        learned(model)
    return str(error.value)


def test_load_that_reaches_nothing_of_a_layer_is_an_error() -> None:
    """Whatever names the loader reports: its copy goes to a placeholder without memory."""
    from trainer.weight_sync.vllm_reload import Reload

    settings = SimpleNamespace()
    config = SimpleNamespace(hf_config=settings, hf_text_config=settings, dtype=torch.float32)
    model = Model()
    before = model.norm.weight.clone()
    model.__class__ = Direct
    reload = Reload(model, config, torch.device("cpu"))
    with pytest.raises(ValueError, match=r"loads nothing into these layers .*: \['norm'\]"):
        reload.load(weights(2))
    reload.finish()
    assert torch.equal(model.norm.weight, before)
