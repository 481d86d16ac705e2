"""The auxiliary loss that balances the load of a mixture's experts (Switch Transformer, arXiv
2101.03961, equations 4 to 6), by transformers' own function for the model.

Invariant: each token of a micro-batch counts once, also one that several paths of a tree share.
There is no padding in a micro-batch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from trainer.errors import ConfigError
from trainer.policy.context_parallel import all_tokens
from trainer.policy.shrink import CHOSEN, EXPERTS, number_of, shrunk
from trainer.rows.packing import MicroBatch


@dataclass(frozen=True, slots=True)
class RouterBalance:
    """The auxiliary loss of one model: 1 per chosen expert if the routers use all experts equally,
    and more otherwise."""

    experts: int
    chosen: int
    formula: Callable[..., Tensor]

    @classmethod
    def of(cls, model: Any) -> RouterBalance:
        """The loss of a model that `check_balance` accepts. Its decoder returns the scores of its
        routers from now on."""
        text, decoder = model.config.get_text_config(), model.get_decoder()
        decoder.config.output_router_logits = True
        module = sys.modules[type(decoder).__module__]
        formula = getattr(module, "load_balancing_loss_func", _no_formula)
        return cls(number_of(text, EXPERTS), number_of(text, CHOSEN), formula)

    def __call__(self, output: Any, micro: MicroBatch) -> Tensor:
        """The loss of a decoder's output for the micro-batch, a scalar. Every layer's scores are
        `[T, E]`, from all ranks that compute a part of it."""
        scores = (each.float().reshape(-1, self.experts) for each in output.router_logits)
        whole = tuple(all_tokens(micro, each) for each in scores)
        return self.formula(whole, self.experts, self.chosen)


def check_balance(settings: Any, path: Path) -> None:
    """Raises ConfigError if transformers has no auxiliary loss for the architecture."""
    small = shrunk(settings)
    with torch.random.fork_rng(devices=[]):
        model = AutoModelForCausalLM.from_config(small, dtype=torch.float32)
    balance = RouterBalance.of(model)
    ids = torch.arange(1, 7)[None]
    with torch.no_grad():
        output = model.get_decoder()(input_ids=ids, use_cache=False)
    scores = getattr(output, "router_logits", None) or ()
    width = {each.shape[-1] for each in scores}
    if balance.formula is _no_formula or width != {balance.experts}:
        raise ConfigError(
            f"model.router_aux_loss: {path}: transformers has no load-balancing loss for "
            f"{settings.model_type} models; set model.router_aux_loss=0"
        )


def _no_formula(*_scores: Any) -> Tensor:
    raise NotImplementedError("transformers has no load-balancing loss for this model")
