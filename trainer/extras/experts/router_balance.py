"""The auxiliary loss that balances the load of a mixture's experts (Switch Transformer, arXiv
2101.03961, equations 4 to 6), by transformers' own function for the model.

Invariant: each token of a micro-batch counts once, also one that several paths of a tree share.
There is no padding in a micro-batch.

Routers keep their scores until the loss reads them. transformers' own way (`output_router_logits`)
asks a context variable in each router, which cuts the graphs of compiled layers in two.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.utils.output_capturing import OutputRecorder

from trainer.errors import ConfigError
from trainer.policy.context_parallel import all_tokens
from trainer.policy.shrink import CHOSEN, EXPERTS, number_of, shrunk
from trainer.rows.packing import MicroBatch

_SCORES = "kept_scores"
"""The attribute of a router."""


@dataclass(frozen=True, slots=True)
class RouterBalance:
    """The auxiliary loss of one model: 1 per chosen expert if the routers use all experts equally,
    and more otherwise."""

    experts: int
    chosen: int
    formula: Callable[..., Tensor]
    routers: tuple[nn.Module, ...]
    """In the order of their layers."""

    @classmethod
    def of(cls, model: Any) -> RouterBalance:
        """The loss of a model that `check_balance` accepts. Its routers keep their scores from now
        on."""
        text, decoder = model.config.get_text_config(), model.get_decoder()
        module = sys.modules[type(decoder).__module__]
        formula = getattr(module, "load_balancing_loss_func", _no_formula)
        routers = tuple(_keeping_scores(decoder))
        return cls(number_of(text, EXPERTS), number_of(text, CHOSEN), formula, routers)

    def __call__(self, micro: MicroBatch) -> Tensor:
        """The loss of the decoder's last pass, over the micro-batch, a scalar. Every layer's scores
        are `[T, E]`, from all ranks that compute a part of it."""
        scores = (each.float().reshape(-1, self.experts) for each in self.scores())
        whole = tuple(all_tokens(micro, each) for each in scores)
        return self.formula(whole, self.experts, self.chosen)

    def scores(self) -> list[Tensor]:
        """What the routers have kept, which they no longer do."""
        kept = (vars(router).pop(_SCORES, None) for router in self.routers)
        return [each for each in kept if each is not None]


def check_balance(settings: Any, path: Path) -> None:
    """Raises ConfigError if transformers has no auxiliary loss for the architecture."""
    small = shrunk(settings)
    with torch.random.fork_rng(devices=[]):
        model = AutoModelForCausalLM.from_config(small, dtype=torch.float32)
    balance = RouterBalance.of(model)
    ids = torch.arange(1, 7)[None]
    with torch.no_grad():
        model.get_decoder()(input_ids=ids, use_cache=False)
    width = {each.shape[-1] for each in balance.scores()}
    if balance.formula is _no_formula or width != {balance.experts}:
        raise ConfigError(
            f"model.router_aux_loss: {path}: transformers has no load-balancing loss for "
            f"{settings.model_type} models; set model.router_aux_loss=0"
        )


def _keeping_scores(decoder: nn.Module) -> Iterator[nn.Module]:
    """The routers, which transformers names with the index of the scores in what they return."""
    recorder = (getattr(decoder, "_can_record_outputs", None) or {}).get("router_logits")
    if not isinstance(recorder, OutputRecorder) or recorder.target_class is None:
        return
    inside = f".{recorder.layer_name}." if recorder.layer_name else ""
    for name, module in decoder.named_modules():
        if isinstance(module, recorder.target_class) and inside in f".{name}.":
            module.register_forward_hook(functools.partial(_keep, recorder.index))
            yield module


def _keep(index: int, router: nn.Module, _given: Any, output: Any) -> None:
    setattr(router, _SCORES, output[index] if isinstance(output, tuple) else output)


def _no_formula(*_scores: Any) -> Tensor:
    raise NotImplementedError("transformers has no load-balancing loss for this model")
