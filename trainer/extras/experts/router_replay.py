"""Replays the experts that the engine's router chose (Rollout Routing Replay, arXiv 2510.11370).

The router of the trainer computes its scores as always, and only its choice of the highest ones
is replaced: each token's experts are the recorded ones, weighted by the trainer's own scores of
them, so that the gradient flows through the router. Invariant: a token without a recorded row is
routed by the trainer, and so is every token of a micro-batch without rows.

The rows are an argument of each layer, so that a layer that is computed again for its backward pass
(gradient checkpointing) replays the same rows.

Shapes: `T` tokens of a micro-batch, `L` layers, `K` experts per token, `E` experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM

from trainer.batch import Batch
from trainer.errors import ConfigError, TrainingError
from trainer.policy.scorer import EXPERTS_ARGUMENT
from trainer.policy.shrink import CHOSEN, EXPERTS, number_of, shrunk


def replay_routing(model: Any) -> None:
    """Makes every layer of the model accept the argument, and replay it in its block of experts."""
    count = number_of(model.config.get_text_config(), EXPERTS)
    for index, layer in enumerate(model.get_decoder().layers):
        block = next(_blocks_of_experts(layer), None)
        choice = _Choice(count)
        if block is not None:
            block.forward = _with_choice(block.forward, choice)
        layer.register_forward_pre_hook(_taking_rows(choice, index), with_kwargs=True)


def check_replay(settings: Any, path: Path) -> None:
    """Checks on a small copy of the architecture that its experts compute exactly the tokens that
    recorded rows assign to them. Raises ConfigError, which names the layer."""
    small = shrunk(settings)
    problem = _problem(small)
    if problem is not None:
        raise ConfigError(
            f"model.router_replay=replay: {path}: {settings.model_type} models cannot replay the "
            f"engine's routing: {problem}; set model.router_replay=off"
        )


def check_rows(model: Any, batch: Batch) -> None:
    """Raises TrainingError if recorded rows are of another model than the one that is trained."""
    text = model.config.get_text_config()
    expected = (text.num_hidden_layers, number_of(text, CHOSEN))
    experts = number_of(text, EXPERTS)
    for index, routing in enumerate(batch.routing):
        if routing is None:
            continue
        rows = routing.experts
        if rows.shape[1:] != expected or (rows.size and int(rows.max()) >= experts):
            trial = batch.trial_ids[int(batch.sequence_rollout[index])]
            raise TrainingError(
                f"rollout {trial}: its routed experts have {rows.shape[1]} layers of "
                f"{rows.shape[2]} experts up to {int(rows.max(initial=0))}, and the model has "
                f"{expected[0]} of {expected[1]} up to {experts - 1}; the engine must serve the "
                "model that is trained"
            )


def replayed_share(batch: Batch) -> float:
    """The share of the tokens with a recorded row, of all that predict another token."""
    predicting = sum(len(ids) - 1 for ids in batch.sequences)
    known = sum(int(r.known[:-1].sum()) for r in batch.routing if r is not None)
    return known / max(predicting, 1)


class _Choice(TorchFunctionMode):
    """Replaces the choice of the `K` highest scores while rows are set."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.rows: Tensor | None = None
        """`[T, K]`; negative where the trainer chooses."""
        self._experts = experts

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk) or self.rows is None:
            return result
        scores = args[0]
        if scores.shape[-1] != self._experts or result.indices.shape != self.rows.shape:
            return result  # a choice of groups of experts
        chosen = torch.where(self.rows < 0, result.indices, self.rows.long())
        return torch.return_types.topk((scores.gather(-1, chosen), chosen))


def _with_choice(forward: Callable[..., Any], choice: _Choice) -> Callable[..., Any]:
    def replaying(*args: Any, **named: Any) -> Any:
        if choice.rows is None:
            return forward(*args, **named)
        with choice:
            return forward(*args, **named)

    return replaying


def _taking_rows(choice: _Choice, index: int) -> Callable[..., Any]:
    """A hook, because torch compiles a layer's function, with its index, for each layer."""

    def take(_layer: nn.Module, args: Any, named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        rows = named.get(EXPERTS_ARGUMENT)
        choice.rows = None if rows is None else rows[:, index]
        return args, {name: each for name, each in named.items() if name != EXPERTS_ARGUMENT}

    return take


def _blocks_of_experts(layer: nn.Module) -> Iterator[Any]:
    return (m for m in layer.modules() if isinstance(getattr(m, "experts", None), nn.Module))


def _problem(small: Any) -> str | None:
    """Why rows are not replayed exactly; None if they are."""
    experts, chosen = number_of(small, EXPERTS), number_of(small, CHOSEN)
    if not experts or not chosen:
        return "they have no experts"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(small, dtype=torch.float32)
        replay_routing(model)
        layers = model.get_decoder().layers
        tokens = 6
        rows = torch.rand(tokens, len(layers), experts).topk(chosen).indices
        rows[0] = -1
        used: dict[int, Tensor] = {}
        for index, layer in enumerate(layers):
            for block in _blocks_of_experts(layer):
                block.experts.register_forward_hook(_keep(used, index, tokens, chosen))
        ids = torch.arange(1, tokens + 1)[None]
        with torch.no_grad():
            model.get_decoder()(input_ids=ids, use_cache=False, **{EXPERTS_ARGUMENT: rows})
    if not used:
        return "none of their layers has a block of experts"
    for index, indices in used.items():
        if not torch.equal(indices[1:], rows[1:, index]):
            return f"the experts of layer {index} are not chosen by the highest scores alone"
    return None


def _keep(used: dict[int, Tensor], index: int, tokens: int, chosen: int) -> Callable[..., None]:
    """A hook that keeps the choice of experts among the arguments of a layer's experts."""

    def keep(_module: nn.Module, args: tuple[Any, ...], _output: Any) -> None:
        for each in args:
            if isinstance(each, Tensor) and not each.is_floating_point():
                used[index] = each.reshape(tokens, chosen)

    return keep
