"""The forward pass of the trainer: packed rows in, scores of tokens out.

Invariant: the scores are equal to those of the model's own forward pass over each path alone, at
the temperature of sampling. `proof.py` checks this for every architecture before it is trained.

Shapes: `T` tokens of a micro-batch, `M` of them predicted, `D` hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from transformers import AttentionInterface

from proxy.settings.late_section import load_extra
from trainer.policy.attention import packed_attention
from trainer.policy.compiled_layers import outside_graphs
from trainer.policy.context_parallel import of_part, of_whole
from trainer.policy.delta_layers import has_delta_layers
from trainer.policy.image_reader import reader_of
from trainer.policy.shrink import EXPERTS
from trainer.policy.token_logprobs import OutputLayer, token_logprobs
from trainer.rows.packing import MicroBatch

EXPERTS_ARGUMENT = "routed_experts"
"""The argument of a decoder that replays its routing: the experts that the engine chose."""
ATTENTION = "packed_paths"
"""The name under which packed attention is registered with transformers."""


def use_packed_rows(model: Any) -> None:
    """Makes the layers of a Hugging Face model compute packed rows and trees."""
    AttentionInterface.register(ATTENTION, outside_graphs(packed_attention))
    model.set_attn_implementation(ATTENTION)
    _keep_what_is_shared(model)
    if has_delta_layers(model):
        load_extra("trainer.extras.hybrids.delta_rule:fork_states")(model)
    if any(getattr(model.config.get_text_config(), name, None) for name in EXPERTS):
        load_extra("trainer.extras.experts.autocast_experts:multiply_in_autocast")(model)


def _keep_what_is_shared(model: Any) -> None:
    """Gemma 4's last layer of each kind hands its keys and values to layers that share them. Where
    none does, they would only be held until the end of the pass, and need graphs of their own."""
    modules = list(model.modules())
    if not any(getattr(each, "is_kv_shared_layer", False) for each in modules):
        for each in modules:
            if hasattr(each, "store_full_length_kv"):
                each.store_full_length_kv = False


class BalanceLoss(Protocol):
    """The auxiliary loss of the routers, which keep their scores in each pass of the decoder."""

    def __call__(self, micro: MicroBatch) -> Tensor:
        """Of the last pass, a scalar."""

    def scores(self) -> Sequence[Tensor]:
        """What the routers have kept in the last pass, which they no longer do."""


class Scored(NamedTuple):
    """What a forward pass gives."""

    logprobs: Tensor
    """`[M]`"""
    entropy: Tensor
    """`[M]`"""
    imbalance: Tensor | None
    """The auxiliary loss of the routers, a scalar; None if it is not trained."""


class CausalScorer(nn.Module):
    """Computes the log-probabilities of given tokens, and the entropies of their distributions.

    With `balance`, also the auxiliary loss of the routers, while in training mode. `offload`: what
    the decoder keeps for the backward pass is in the machine's memory. `fused`: the output layer is
    compiled, as the layers are by `compile_layers`.
    """

    def __init__(
        self,
        model: Any,
        compute_dtype: torch.dtype,
        *,
        balance: BalanceLoss | None = None,
        offload: bool = False,
        fused: bool = False,
    ) -> None:
        super().__init__()
        self.model = model
        self.compute_dtype = compute_dtype
        self.balance = balance
        self.offload = offload
        self.fused = fused

    def forward(
        self,
        micro: MicroBatch,
        ids: Tensor,
        temperature: float,
        *,
        kept: Tensor | None = None,
        entropy_grad: bool = False,
    ) -> Scored:
        """The scores of the tokens `ids` `[M]` as the targets of the micro-batch, or of a part of
        it, whose other parts are computed by other ranks at the same time. `kept` `[M, K]`: among
        these tokens alone, as in `Batch.kept`."""
        replayed = {} if micro.experts is None else {EXPERTS_ARGUMENT: micro.experts}
        with kept_on_host(micro.ids.device) if self.offload else nullcontext():
            output = _decode(self.model, micro, self.compute_dtype, **replayed)
        rows = output.last_hidden_state[0][micro.predictors].to(self.compute_dtype)
        head = output_layer(self.model)
        own = of_part(micro, ids)
        scores = token_logprobs(
            rows,
            head,
            own,
            temperature,
            kept=None if kept is None else of_part(micro, kept),
            entropy_grad=entropy_grad,
            fused=self.fused,
        )
        logprobs, entropy = (of_whole(micro, each) for each in scores)
        imbalance = None
        if self.balance is not None and self.training:
            imbalance = self.balance(micro)
        elif self.balance is not None:
            self.balance.scores()  # with what autograd keeps of their layers
        return Scored(logprobs, entropy, imbalance)


def last_hidden(
    model: Any, micro: MicroBatch, compute_dtype: torch.dtype, *, offload: bool = False
) -> Tensor:
    """The decoder's last hidden states of a packed row, `[T, D]`, or of the tokens of a part."""
    with kept_on_host(micro.ids.device) if offload else nullcontext():
        hidden: Tensor = _decode(model, micro, compute_dtype).last_hidden_state[0]
    return hidden


def kept_on_host(device: torch.device) -> AbstractContextManager[Any]:
    """A context in which what autograd keeps is in the machine's memory. Within layers that are
    computed again, autograd keeps their inputs only."""
    return save_on_cpu(pin_memory=device.type == "cuda")


def _decode(model: Any, micro: MicroBatch, compute_dtype: torch.dtype, **arguments: Any) -> Any:
    device, reader = micro.ids.device.type, reader_of(model)
    with torch.autocast(device, compute_dtype, enabled=compute_dtype != torch.float32):
        given = {"input_ids": micro.ids[None]}
        if reader is not None and micro.images is not None:
            given = reader.inputs(micro)
        return model.get_decoder()(
            **given,
            # [1, T], or [3, 1, T]
            position_ids=micro.positions.unsqueeze(-2),
            layout=micro.layout,
            use_cache=False,
            **arguments,
        )


def output_layer(model: Any) -> OutputLayer:
    """The output layer, with the transformations of its logits that the configuration declares."""
    text, head = model.config.get_text_config(), model.get_output_embeddings()
    scale = 1.0
    for name in ("logit_scale", "lm_head_multiplier"):
        scale *= getattr(text, name, None) or 1.0
    return OutputLayer(
        head.weight,
        getattr(head, "bias", None),
        scale / (getattr(text, "logits_scaling", None) or 1.0),
        getattr(text, "final_logit_softcapping", None),
    )
