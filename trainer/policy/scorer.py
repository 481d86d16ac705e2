"""The forward pass of the trainer: packed rows in, scores of tokens out.

Invariant: the scores are equal to those of the model's own forward pass over each path alone, at
the temperature of sampling. `proof.py` checks this for every architecture before it is trained.

Shapes: `T` tokens of a micro-batch, `M` of them predicted, `D` hidden size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from trainer.packing import MicroBatch
from trainer.policy.attention import packed_attention
from trainer.policy.delta_rule import fork_states
from trainer.policy.router_replay import ARGUMENT
from trainer.policy.token_logprobs import OutputLayer, token_logprobs

ATTENTION = "packed_paths"
"""The name under which packed attention is registered with transformers."""


def use_packed_rows(model: Any) -> None:
    """Makes the layers of a Hugging Face model compute packed rows and trees."""
    AttentionInterface.register(ATTENTION, packed_attention)
    model.set_attn_implementation(ATTENTION)
    fork_states(model)


class CausalScorer(nn.Module):
    """Computes the log-probabilities of given tokens, and the entropies of their distributions."""

    def __init__(self, model: Any, compute_dtype: torch.dtype) -> None:
        super().__init__()
        self.model = model
        self.compute_dtype = compute_dtype

    def forward(
        self, micro: MicroBatch, ids: Tensor, temperature: float, *, entropy_grad: bool = False
    ) -> tuple[Tensor, Tensor]:
        """`(log-probabilities, entropies)`, both `[M]`, of the tokens `ids` `[M]` as the targets of
        the micro-batch."""
        decoder = self.model.get_decoder()
        hidden = last_hidden(decoder, micro, self.compute_dtype, experts=micro.experts)
        rows = hidden[micro.predictors].to(self.compute_dtype)
        head = output_layer(self.model)
        return token_logprobs(rows, head, ids, temperature, entropy_grad=entropy_grad)


def last_hidden(
    decoder: nn.Module,
    micro: MicroBatch,
    compute_dtype: torch.dtype,
    *,
    experts: Tensor | None = None,
) -> Tensor:
    """The output of the decoder, `[T, D]`, for a packed row. `experts` `[T, L, K]` are replayed by
    a decoder that `replay_routing` has prepared."""
    device = micro.ids.device.type
    replayed = {} if experts is None else {ARGUMENT: experts}
    with torch.autocast(device, compute_dtype, enabled=compute_dtype != torch.float32):
        output = decoder(
            input_ids=micro.ids[None],
            position_ids=micro.positions[None],
            layout=micro.layout,
            use_cache=False,
            **replayed,
        )
    hidden: Tensor = output.last_hidden_state[0]
    return hidden


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
