"""Experts divided among ranks: NeMo Automodel's mixture of experts in place of transformers'.

Invariant: it computes the same as transformers' layer, and every tensor keeps its name outside of
this module: `hf_tensor` gives transformers' name and shape, `own_tensor` is its inverse.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

_TRANSPOSED = {
    "experts.gate_and_up_projs": "experts.gate_up_proj",
    "experts.down_projs": "experts.down_proj",
}
"""Automodel's name of a fused weight of all experts → transformers', whose last two dimensions are
in the other order."""


def divide_experts(model: Any) -> None:
    """Replaces the experts of a Qwen3-MoE on the device `meta`, so that they can be divided."""
    from nemo_automodel.components.models.common.utils import BackendConfig
    from nemo_automodel.components.moe.config import MoEConfig
    from nemo_automodel.components.moe.layers import MoE

    settings = model.config
    config = MoEConfig(
        n_routed_experts=settings.num_experts,
        n_shared_experts=0,
        n_activated_experts=settings.num_experts_per_tok,
        n_expert_groups=0,
        n_limited_groups=0,
        train_gate=True,
        gate_bias_update_factor=0.0,
        aux_loss_coeff=0.0,
        score_func="softmax",
        route_scale=1.0,
        dim=settings.hidden_size,
        inter_dim=settings.intermediate_size,
        moe_inter_dim=settings.moe_intermediate_size,
        norm_topk_prob=settings.norm_topk_prob,
        softmax_before_topk=True,
        dtype=model.dtype,
    )
    backend = BackendConfig(
        attn="sdpa",
        linear="torch",
        rms_norm="torch",
        experts="torch",
        dispatcher="torch",
        rope_fusion=False,
    )
    decoder = model.get_decoder()
    for layer in decoder.layers:
        if hasattr(layer.mlp, "experts"):
            layer.mlp = MoE(config, backend)
    decoder.moe_config = config  # where Automodel looks for it


def hf_tensor(name: str, tensor: Tensor) -> tuple[str, Tensor]:
    """A tensor of the model under transformers' name and in its shape."""
    for own, theirs in _TRANSPOSED.items():
        if name.endswith(own):
            return name.removesuffix(own) + theirs, tensor.transpose(1, 2).contiguous()
    return name, tensor


def own_tensor(name: str, tensor: Tensor) -> tuple[str, Tensor]:
    """The inverse of `hf_tensor`."""
    for own, theirs in _TRANSPOSED.items():
        if name.endswith(theirs):
            return name.removesuffix(theirs) + own, tensor.transpose(1, 2)
    return name, tensor
