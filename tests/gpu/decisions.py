"""What a vLLM for GPUs decides about our servers, as JSON; `test_gpu_environment.py` reads it.

python -m tests.gpu.decisions FILE
"""

from __future__ import annotations

import importlib.util
import json
import os
import pkgutil
import sys
import tempfile
import traceback
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from tests.gpu.posing import pose

Facts = dict[str, Any]
OURS = ("shm", "gloo", "nccl")
MODULES = (
    "vllm.entrypoints.openai.api_server",
    "vllm.entrypoints.cli.serve",
    "vllm.v1.engine.core",
    "vllm.v1.worker.gpu_worker",
    "vllm.v1.worker.gpu_model_runner",
    "vllm.v1.attention.backends.flash_attn",
    "vllm.v1.attention.backends.flex_attention",
    "vllm.v1.attention.backends.triton_attn",
    "vllm.lora.ops.triton_ops",
    "vllm.device_allocator.cumem",
    "vllm.model_executor.model_loader.reload.layerwise",
    "vllm.distributed.weight_transfer.factory",
    "vllm.distributed.weight_transfer.nccl_engine",
)
"""What vLLM imports late because of our arguments. What our code itself names is collected."""
VARIANTS: dict[str, Facts] = {
    "plain": {},
    "sleep": {"sleep": True},
    "share": {"gpu_memory_share": 0.4},
    "cache": {"kv_cache_gib": 2},
    "adapters": {"lora_rank": 16},
    "nccl": {"weight_transfer": "nccl"},
    "gloo": {"weight_transfer": "gloo"},
    "routed experts": {"routed_experts": True},
    "float32": {"dtype": "float32"},
}


def main(out: Path) -> None:
    pose()
    facts = {}
    for question in QUESTIONS:
        facts[question.__name__] = _answer(question)
        out.write_text(json.dumps(facts, indent=1))


def _answer(ask: Callable[[], Facts]) -> Facts:
    try:
        return ask()
    except Exception as error:  # noqa: BLE001 (an answer, too)
        frames = traceback.extract_tb(error.__traceback__)[-6:]
        return {"error": _words(error), "at": [f"{each.filename}:{each.lineno}" for each in frames]}


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:600]


def platform() -> Facts:
    found: Any = import_module("vllm.platforms").current_platform
    chosen = import_module("proxy.engines.vllm_platform")
    return {
        "device": found.device_type,
        "capability": found.get_device_capability().as_version_str(),
        "name": found.get_device_name(),
        "ours": chosen.installed().device,
        "agrees": chosen.require("gpu", found).device,
        "attention": dict(chosen.installed().attention),
        "latent": list(chosen.installed().latent_dtypes),
    }


def gpus() -> Facts:
    """The GPUs that the plan divides, by torch and NVML."""
    torch: Any = import_module("torch")
    torch.cuda.device_count = lambda: 1
    found = import_module("trainer.cluster.device_plan").gpus_here()
    return {"found": [[each.name, each.memory, each.free] for each in found]}


def imports() -> Facts:
    """Module → why it cannot be imported; empty: it can."""
    models: Any = import_module("vllm.models")
    ours: Any = import_module("trainer.weight_sync")
    used = import_module("tests.conformance.uses").collect({"vllm"})
    names = sorted({*MODULES, *(_module(each.name) for each in used.names)})
    names += [f"vllm.models.{each.name}" for each in pkgutil.iter_modules(models.__path__)]
    names += [f"trainer.weight_sync.{each.name}" for each in pkgutil.iter_modules(ours.__path__)]
    return {name: _imported(name) for name in names}


def _module(name: str) -> str:
    """The module that has a name, or is one. Importing what contains it may fail, which `imports`
    then says of it."""
    if not (parent := name.rpartition(".")[0]):
        return name
    try:
        return name if importlib.util.find_spec(name) else _module(parent)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        return _module(parent) if name.startswith(missing) else name


def _imported(name: str) -> str:
    try:
        import_module(name)
    except Exception as error:  # noqa: BLE001 (any of them ends an engine)
        return _words(error)
    return ""


def driver() -> Facts:
    """Whether importing has initialised CUDA: then it would be too late to choose GPUs."""
    calls = Path(os.environ["STUB_CALLS"])
    torch: Any = import_module("torch")
    calls_made = calls.read_text().split() if calls.exists() else []
    return {"initialised": torch.cuda.is_initialized(), "calls": calls_made}


def plugin() -> Facts:
    import_module("vllm.plugins").load_general_plugins()
    factory: Any = import_module("vllm.distributed.weight_transfer.factory")
    engines = factory.WeightTransferEngineFactory
    found = {name: engines._registry[name]().__name__ for name in OURS}
    worker: Any = import_module("vllm.v1.worker.worker_base").WorkerWrapperBase
    return {"engines": found, "reports types": hasattr(worker, "held_dtypes")}


def environment() -> Facts:
    """Type → the variables that a server's process gets and this one does not have."""
    vllm: Any = import_module("tests.gpu.vllm_on_gpu")
    dense = next(each for each in vllm.TRAINED if each.kind == "qwen3")
    with tempfile.TemporaryDirectory() as folder:
        vllm.written(dense, Path(folder))
        given = {dtype: vllm.started(Path(folder), dtype)[1] for dtype in ("float32", "bfloat16")}
    return {dtype: dict(given[dtype].items() - os.environ.items()) for dtype in given}


def architectures() -> Facts:
    """Title of a class → vLLM's configuration of our server on it, and its attention by type."""
    with tempfile.TemporaryDirectory() as folder:
        vllm: Any = import_module("tests.gpu.vllm_on_gpu")
        return {each.title: _answer(partial(_architecture, each, folder)) for each in vllm.TRAINED}


def _architecture(architecture: Any, folder: str) -> Facts:
    vllm: Any = import_module("tests.gpu.vllm_on_gpu")
    path = Path(folder, architecture.kind)
    vllm.written(architecture, path)
    config = vllm.configured(vllm.arguments(path, "bfloat16"))
    attention = {dtype: _attention(path, dtype) for dtype in ("float32", "bfloat16")}
    return {**_decided(config), "attention": attention}


def _decided(config: Any) -> Facts:
    compilation = config.compilation_config
    return {
        "eager": config.model_config.enforce_eager,
        "compiles": compilation.mode.name,
        "graphs": compilation.cudagraph_mode.name,
        "type": str(config.model_config.dtype),
        "transfer": config.weight_transfer_config and config.weight_transfer_config.backend,
        "cache bytes": config.cache_config.kv_cache_memory_bytes,
        "sleeps": config.model_config.enable_sleep_mode,
        "adapter type": config.lora_config and str(config.lora_config.lora_dtype),
    }


def _attention(path: Path, dtype: str) -> str:
    vllm: Any = import_module("tests.gpu.vllm_on_gpu")
    select: Any = import_module("vllm.v1.attention.selector").get_attn_backend
    torch: Any = import_module("torch")
    try:
        config = vllm.configured(vllm.arguments(path, dtype))
        model = config.model_config
        with import_module("vllm.config").set_current_vllm_config(config):
            backend = select(
                model.get_head_size(), getattr(torch, dtype), "auto", use_mla=model.use_mla
            )
    except Exception as error:  # noqa: BLE001 (an answer, too)
        return _words(error)
    return str(backend.get_name())


def variants() -> Facts:
    """Settings of `engine` → vLLM's configuration of a mixture of experts with them."""
    vllm: Any = import_module("tests.gpu.vllm_on_gpu")
    (experts,) = (each for each in vllm.TRAINED if each.kind == "qwen3_moe")
    with tempfile.TemporaryDirectory() as folder:
        vllm.written(experts, Path(folder))
        return {
            name: _answer(partial(_variant, Path(folder), dict(settings)))
            for name, settings in VARIANTS.items()
        }


def _variant(path: Path, settings: Facts) -> Facts:
    vllm: Any = import_module("tests.gpu.vllm_on_gpu")
    words = vllm.arguments(path, settings.pop("dtype", "bfloat16"), **settings)
    return _decided(vllm.configured(words))


def precision() -> Facts:
    """How float32 is multiplied in the environment of our servers, and without it."""
    product: Any = import_module("tests.gpu.product")
    attention: Any = import_module("vllm.v1.attention.ops.triton_unified_attention")
    usual = product.multiplies_in_tf32()
    os.environ.update(environment()["float32"])
    return {
        "usual tf32": usual,
        "ours tf32": product.multiplies_in_tf32(),
        "dots of attention": product.dots(attention),
        "products": import_module("vllm.envs").VLLM_FLOAT32_MATMUL_PRECISION,
    }


QUESTIONS = (
    platform,
    gpus,
    imports,
    driver,
    plugin,
    environment,
    architectures,
    variants,
    precision,
)

if __name__ == "__main__":
    main(Path(sys.argv[1]))
