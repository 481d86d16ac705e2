"""A model divided among ranks by NeMo Automodel: its matrices, its layers, or its experts.

Invariant: each rank reads one layer of the checkpoint after another and keeps only its part, so
that no rank ever holds the whole model. The layers are transformers' own, with packed attention
(`scorer.py`), except that experts which are divided are Automodel's (`divided_experts.py`).

Automodel gives the meshes, the plans of tensor parallelism, FSDP2, the experts, and the norm of the
gradient over all of them. All of it is imported here and in `divided_experts.py`.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import AutoModelForCausalLM

from trainer.errors import TrainingError
from trainer.extras.automodel.divided_experts import divide_experts, own_tensor
from trainer.extras.automodel.pipeline import Stages
from trainer.extras.automodel.vocabulary_parallel import divided_logprobs
from trainer.policy.architecture import check_model, without_noise
from trainer.policy.export import Translate
from trainer.policy.loading import load_weights
from trainer.policy.model_config import DTYPES, ModelConfig, load_settings
from trainer.policy.parallel import Ranks
from trainer.policy.proof import prove
from trainer.policy.scorer import use_packed_rows
from trainer.rows.packing import MicroBatch


@dataclass(frozen=True, slots=True)
class Meshes:
    """The ranks in Automodel's order: stages, then groups, then parts of matrices."""

    ranks: Any
    """Mesh with the dimensions `pp`, `dp` and `tp`."""
    experts: Any
    """Mesh with the dimensions `ep_shard` and `ep`; None if experts are not divided."""

    @classmethod
    def of(cls, ranks: Ranks) -> Meshes:
        """The meshes of all ranks. All ranks call this together."""
        from nemo_automodel.components.distributed.config import FSDP2Config
        from nemo_automodel.components.distributed.mesh import ParallelismSizes
        from nemo_automodel.components.distributed.mesh_utils import _create_device_meshes

        divided = ranks.parallelism
        sizes = ParallelismSizes(
            tp_size=divided.tensor, pp_size=divided.pipeline, ep_size=divided.expert
        )
        with _quiet():
            meshes = _create_device_meshes(FSDP2Config(), sizes, world_size=ranks.size)
        return cls(*meshes)

    @property
    def stages(self) -> Stages:
        mesh = self.ranks["pp"]
        return Stages(mesh.size(), mesh.get_local_rank(), mesh.get_group())

    def clip(self, module: nn.Module, max_norm: float) -> Tensor:
        """Clips the gradient, which every rank has added up, to a norm. Returns the norm that the
        whole gradient had."""
        from nemo_automodel.components.distributed.tp_replicas import (
            synchronize_tp_replica_gradients,
        )
        from nemo_automodel.components.training.utils import scale_grads_and_clip_grad_norm

        with _quiet():
            # once per step: the norms of heads have a part of their gradient on each rank
            synchronize_tp_replica_gradients([module], self.ranks)
            norm = scale_grads_and_clip_grad_norm(
                max_norm,
                [module],
                pp_enabled=self.ranks["pp"].size() > 1,
                pp_axis_name="pp",
                device_mesh=self.ranks,
                moe_mesh=self.experts,
                ep_axis_name="ep" if self.experts is not None else None,
                dp_group_size=self.ranks["dp"].size(),
                foreach=False,
            )
        return norm.full_tensor() if isinstance(norm, DTensor) else torch.as_tensor(norm)


def load_divided(
    config: ModelConfig, ranks: Ranks, meshes: Meshes, device: torch.device, *, trainable: bool
) -> Any:
    """This rank's part of the checkpoint at `config.path`, in float32 (or the compute type, if it
    is not trained). Its forward pass is `score`.

    Raises ConfigError as `load_model`.
    """
    settings = without_noise(load_settings(config.path))
    prove(settings, config.path)
    dtype = torch.float32 if trainable else DTYPES[config.compute_dtype]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(settings, dtype=dtype)
        check_model(model, config.path)
        if ranks.parallelism.expert > 1:
            divide_experts(model)
    meshes.stages.keep(model)
    use_packed_rows(model)
    if config.gradient_checkpointing and trainable:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.requires_grad_(trainable)
    model.forward = MethodType(score, model)
    model = _divide(model, ranks, meshes, DTYPES[config.compute_dtype])
    model.to_empty(device=device)
    if settings.tie_word_embeddings:
        model.tie_weights()
    rename = own_tensor if ranks.parallelism.expert > 1 else None
    _read(model, config, settings, dtype, rename)
    return model


def score(
    self: Any,
    given: Tensor,
    *,
    micro: MicroBatch,
    ids: Tensor,
    kept: Tensor | None,
    temperature: float,
    entropy_grad: bool,
    compute_dtype: torch.dtype,
) -> Tensor:
    """The forward pass of a stage: ids or hidden states of a packed row to hidden states, or to the
    scores `[2, M]` of the tokens `ids`, among those of `kept`."""
    inputs = "input_ids" if self.get_decoder().embed_tokens is not None else "inputs_embeds"
    low = compute_dtype != torch.float32
    with torch.autocast(given.device.type, compute_dtype, enabled=low):
        hidden = self.get_decoder()(
            **{inputs: given},
            position_ids=micro.positions[None],
            layout=micro.layout,
            use_cache=False,
        ).last_hidden_state
        if self.lm_head is None:
            sent: Tensor = hidden.to(compute_dtype)
            return sent
        logits = self.lm_head(hidden[0][micro.predictors])
    scores = divided_logprobs(logits, ids, temperature, kept=kept, entropy_grad=entropy_grad)
    return torch.stack(scores)


def _divide(model: Any, ranks: Ranks, meshes: Meshes, compute_dtype: torch.dtype) -> Any:
    from nemo_automodel.components.distributed.parallelizer import fsdp2_strategy_parallelize
    from nemo_automodel.components.moe.parallelizer import parallelize_model

    divided = ranks.parallelism
    precision = MixedPrecisionPolicy(
        param_dtype=compute_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    with _quiet():
        if divided.expert > 1:
            parallelize_model(
                model,
                meshes.ranks,
                meshes.experts,
                dp_axis_names=("dp_shard_cp",),
                ep_axis_name="ep",
                ep_shard_axis_names=("ep_shard",),
                mp_policy=precision,
            )
        elif ranks.size > divided.pipeline:
            model = fsdp2_strategy_parallelize(model, meshes.ranks, mp_policy=precision)
    return model


def _read(
    model: Any,
    config: ModelConfig,
    settings: Any,
    dtype: torch.dtype,
    rename: Translate | None,
) -> None:
    """Reads the checkpoint into the model, one layer after another. `rename` gives tensors of
    transformers' model their names and shapes in this one."""
    expected = dict(model.named_parameters()) | dict(model.named_buffers())
    read: set[str] = set()

    def take(prefix: str, tensors: Mapping[str, Tensor]) -> None:
        for found, tensor in tensors.items():
            name, whole = prefix + found, tensor
            if rename is not None:
                name, whole = rename(name, whole)
            if name in expected and not whole.is_meta:
                _copy(expected[name], whole)
                read.add(name)

    def place(layer: Any) -> None:
        take(f"model.layers.{layer.self_attn.layer_idx}.", dict(layer.named_parameters()))
        layer.to(device="meta")

    source = load_weights(config.path, settings, dtype, place=place)
    take("", dict(source.named_parameters()) | dict(source.named_buffers()))
    if missing := expected.keys() - read:
        raise TrainingError(f"{config.path}: {min(missing)} was not read")
    # how transformers has renamed what it read, which `export.py` reverts
    model._weight_conversions = source._weight_conversions


@torch.no_grad()
def _copy(part: Tensor, whole: Tensor) -> None:
    """Copies this rank's part of a tensor."""
    if isinstance(part, DTensor):
        shape, start = compute_local_shape_and_global_offset(
            whole.shape, part.device_mesh, part.placements
        )
        cut = (slice(first, first + size) for first, size in zip(start, shape, strict=True))
        part, whole = part.to_local(), whole[tuple(cut)]
    part.copy_(whole)


@contextmanager
def _quiet() -> Iterator[None]:
    """A context without the warnings that Automodel 0.7 causes by older calls of torch's."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Slicing a flattened dim", category=UserWarning)
        warnings.simplefilter("ignore", FutureWarning)
        yield
