"""Each kind of weight of each class of docs/models.md, sent alone to a vLLM for CPUs.

    python -m tests.e2e.weight_kinds FILE [CLASS …]

A kind is all tensors whose names differ in numbers only (`model.layers.N.mlp.up_proj.weight`). For
each one, only its tensors change, and the update must give every tensor with which vLLM computes
what a fresh load of the same checkpoint gives. Without that kind, the update must be an error.
No engine runs: vLLM's worker, its classes and its loader are real, and nothing is computed.
"""

from __future__ import annotations

import gc
import json
import re
import sys
import tempfile
from collections.abc import Sequence
from contextlib import closing
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from tests.e2e.weight_digest import computed, fresh
from tests.gpu.vllm_on_gpu import TRAINED, arguments, configured, small_settings
from tests.trainer.policy.architectures import Architecture
from trainer.policy.export import checkpoint_tensors
from trainer.policy.proof_on_copy import randomize

Weights = dict[str, torch.Tensor]
CONTEXT = 256
CPU = torch.device("cpu")


def main(out: Path, *titles: str) -> None:
    """`titles`: only these classes of docs/models.md."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        loader = Loader(Path(folder))
        for architecture in TRAINED:
            if not titles or architecture.title in titles:
                found[architecture.title] = _answered(loader, architecture)
                out.write_text(json.dumps(found, indent=1))


def served_settings(architecture: Architecture) -> Any:
    """A small copy with the sizes that vLLM's kernels for a CPU have."""
    settings = small_settings(architecture)
    settings.max_position_embeddings = CONTEXT
    if architecture.kind in ("qwen3_5", "qwen3_5_moe", "qwen3_next"):
        settings.linear_key_head_dim = settings.linear_value_head_dim = 128
    if hasattr(settings, "moe_intermediate_size"):
        settings.moe_intermediate_size = 32
    if architecture.kind == "gpt_oss":
        settings.intermediate_size = 64
    return settings


def written(architecture: Architecture, folder: Path, dtype: torch.dtype) -> Weights:
    """Writes a random checkpoint and returns its tensors under their names in it."""
    settings = served_settings(architecture)
    settings.dtype = dtype
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(settings)
    with torch.no_grad():
        randomize(model)
    model = model.to(dtype)
    model.save_pretrained(folder)
    return {name: tensor.clone() for name, tensor in checkpoint_tensors(model)}


def kind_of(name: str) -> str:
    """Example: "layers.N.mlp.up_proj" of "layers.3.mlp.up_proj"."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "N", name)


def changed(weights: Weights, kind: str, seed: int) -> Weights:
    """The weights, of which those of one kind are other ones."""
    random = torch.Generator().manual_seed(seed)
    return {
        name: (tensor + 0.25 * torch.rand(tensor.shape, generator=random)).to(tensor.dtype)
        if kind_of(name) == kind
        else tensor
        for name, tensor in weights.items()
    }


class Loader:
    """vLLM's loader as a worker for a CPU uses it, in this process."""

    def __init__(self, folder: Path) -> None:
        accelerator: Any = torch.accelerator
        accelerator.empty_cache = lambda: None  # its worker has replaced it, too
        allocation: Any = import_module("vllm.triton_utils.allocation")
        allocation.triton.set_allocator = lambda _: None
        import_module("vllm.plugins").load_general_plugins()
        self._parallel: Any = import_module("vllm.distributed.parallel_state")
        self._parallel.init_distributed_environment(
            1, 0, f"file://{folder}/store", 0, backend="gloo"
        )
        self._settings: Any = import_module("vllm.config")
        self._models: Any = import_module("vllm.model_executor.model_loader")
        self.folder = folder
        gc.freeze()

    def loaded(self, config: Any) -> Any:
        """The model as a worker loads its checkpoint."""
        with self._settings.set_current_vllm_config(config):
            self._parallel.destroy_model_parallel()
            self._parallel.ensure_model_parallel_initialized(1, 1)
            config.compilation_config.static_forward_context.clear()
            return self._models.get_model(vllm_config=config)

    def within(self, config: Any) -> Any:
        return self._settings.set_current_vllm_config(config)


def _answered(loader: Loader, architecture: Architecture) -> dict[str, Any]:
    try:
        return _sent_alone(loader, architecture)
    except Exception as error:  # noqa: BLE001 (of any model)
        return {"error": f"{type(error).__name__}: {error}"}


def _sent_alone(loader: Loader, architecture: Architecture) -> dict[str, Any]:
    """`kinds`: their number; `wrong`: what an update did not do."""
    folder = loader.folder / architecture.kind
    weights = written(architecture, folder, torch.bfloat16)
    # vLLM's kernel of latent attention for processors with AMX has no such small ranks.
    backend = ["--attention-backend=CPU_MLA"] if architecture.kind == "deepseek_v3" else []
    config = configured([*arguments(folder, "bfloat16"), *backend])
    live = loader.loaded(config)
    kinds = sorted({kind_of(name) for name in weights})
    wrong: list[str] = []
    before = fresh(config, weights.items())
    if differing := _differing(before, dict(computed(live))):
        wrong.append(f"a fresh load differs from another one in {differing[:3]}")
    ours: Any = import_module("trainer.weight_sync.vllm_engine")
    segment: Any = import_module("trainer.weight_sync.segment")
    engine = ours.SharedMemoryEngine(config.weight_transfer_config, config, CPU, live)
    with closing(segment.SegmentWriter()) as writer, loader.within(config), torch.no_grad():

        def update(sent: Weights) -> None:
            described = writer.write(sent.items())
            where = (described.path, described.size_bytes, described.digest)
            engine.init_transfer_engine(ours.SharedMemoryInit(*where, writer.report_path))
            engine.start_weight_update()
            engine.receive_weights(ours.SharedMemoryUpdate(*where))
            engine.finish_weight_update()

        for number, kind in enumerate(kinds):
            new = changed(weights, kind, number)
            expected = fresh(config, new.items())
            if not _differing(expected, before):
                wrong.append(f"{kind}: a fresh load does not hold it")
            update(new)
            if differing := _differing(expected, dict(computed(live))):
                wrong.append(f"{kind}: {differing[:3]} are not as after a fresh load")
        for kind in kinds:
            rest = {name: tensor for name, tensor in weights.items() if kind_of(name) != kind}
            try:
                update(rest)
            except ValueError:
                continue
            wrong.append(f"{kind}: an update without it is no error")
        update(weights)
        if differing := _differing(before, dict(computed(live))):
            wrong.append(f"after refused updates, {differing[:3]} are not as after a fresh load")
    engine.shutdown()
    return {"kinds": len(kinds), "wrong": wrong, "staged": engine._refusal or "yes"}


def _differing(expected: Weights, found: Weights) -> Sequence[str]:
    assert expected.keys() == found.keys()
    return [name for name, each in expected.items() if not torch.equal(each, found[name])]


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
