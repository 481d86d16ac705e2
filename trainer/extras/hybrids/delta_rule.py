"""Gated DeltaNet over packed rows and trees: its state is forked at branch points.

A linear layer of Qwen3-Next, Qwen3.5 or OLMo Hybrid (Yang et al., Gated Delta Networks, arXiv
2412.06464) reads its past through two states: the recurrent state

    S_t = S_{t−1} · exp(g_t) · (I − β_t k_t k_tᵀ) + β_t k_t v_tᵀ        o_t = S_tᵀ q_t

and the last `W − 1` inputs of a causal convolution. Invariant: both states of a token are those at
the end of its own path's prefix. A branch begins with the states at the end of the prefix that it
shares, and the gradients of all branches flow back into it, so that a tree equals its paths.

Of a tree in pieces (`trainer.rows.kept`), a piece keeps its states where later pieces begin a
branch: the recurrent state, and the inputs of the convolution that a window there can reach.

Shapes: `T` tokens of a micro-batch, `P` tokens of earlier pieces in front, `C` channels, `W` width
of the convolution, `H` heads, `K` and `V` head sizes of keys and values, `R` runs of a level.
"""

from __future__ import annotations

import functools
import inspect
from bisect import bisect_right
from collections.abc import Callable, Hashable, Sequence
from itertools import accumulate, pairwise
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers.activations import ACT2FN

from trainer.policy.compiled_layers import outside_graphs
from trainer.policy.context_parallel import join_heads, own_heads, split_heads
from trainer.policy.delta_layers import CONVOLUTION, RULE, delta_layers, has_fla
from trainer.rows.kept import Piece, read, tied
from trainer.rows.packing import Layout

STRETCH_TOKENS = 1024
"""A multiple of the 64 tokens of a chunk of transformers' rule, whose backward pass makes a tensor
as long as its input for each chunk: of a whole run, that would cost the square of its length. With
16,384 tokens a pass takes a ninth of the processor time."""
Rule = Callable[..., tuple[Tensor, Tensor]]
"""`(q, k, v, g=…, beta=…, initial_state=…, output_final_state=…, …) → (outputs, final states)`. A
rule of many runs also takes `bounds`, and states `[R, H, K, V]`: where each run begins in the row,
and the row's end."""


def fork_states(model: nn.Module, many: Rule | None = None) -> None:
    """Makes every Gated DeltaNet layer of the model compute packed rows.

    A layer keeps its own `forward`; only the convolution and the recurrence that it calls, which
    are functions of its module, are replaced by those of this module. `many`: the rule of many runs
    to use instead of the device's.
    """
    for module in delta_layers(model):
        forward = inspect.unwrap(type(module).forward)
        own = forward.__globals__
        rule = functools.partial(
            tree_delta_rule, inspect.unwrap(own[RULE]), many=many, layer=(module, "states")
        )
        convolution = functools.partial(tree_convolution, layer=(module, "inputs"))
        functions = own | {CONVOLUTION: convolution, RULE: rule}
        copied = FunctionType(
            forward.__code__, functions, None, forward.__defaults__, forward.__closure__
        )
        copied.__kwdefaults__ = forward.__kwdefaults__
        # Whole: after a break, dynamo would go on in the original module, with its own functions,
        # which know nothing of the paths of a row.
        module.forward = outside_graphs(MethodType(copied, module))


def tree_convolution(
    inputs: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    layout: Layout | None = None,
    use_cache: bool | None = None,
    layer: Hashable = None,
) -> Tensor:
    """Causal convolution of each channel along each path: `[1, C, T]` → `[1, C, T]`; `weight`
    `[C, W]`. A token's window is its `W − 1` ancestors, with zeros before the start of its path."""
    layout = _given(layout)
    inputs = split_heads(inputs, layout, tokens=2, heads=1)
    weight, bias = own_heads(weight, layout), None if bias is None else own_heads(bias, layout)
    width = weight.shape[-1]
    before, past = _before(layout), layout.past
    at = torch.arange(past, past + inputs.shape[-1], device=inputs.device)
    padded = pad(inputs, (0, 1))
    if layout.piece is not None:
        (inputs,) = layout.piece.entered(layer, inputs, dim=2, chosen=layout.piece.reached(width))
        kept, rows = _kept_inputs(layout.piece, layer, inputs.device)
        padded = torch.cat([*kept, inputs, inputs.new_zeros(*inputs.shape[:2], 1)], 2)
        places = torch.full_like(before, padded.shape[-1] - 1)
        places[rows] = torch.arange(len(rows), device=rows.device)
        places[past:] = torch.arange(len(rows), padded.shape[-1], device=rows.device)
    out = weight[:, -1:] * inputs
    for back in range(1, width):
        at = before[at]
        earlier = at if layout.piece is None else places[at]
        out = out + weight[:, width - 1 - back, None] * padded[:, :, earlier]
    if bias is not None:
        out = out + bias[:, None]
    out = (out if activation is None else ACT2FN[activation](out)).to(inputs.dtype)
    return join_heads(out, layout, tokens=2, heads=1)


def tree_delta_rule(
    rule: Rule,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    g: Tensor,
    beta: Tensor,
    initial_state: None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: None = None,
    layout: Layout | None = None,
    use_cache: bool | None = None,
    many: Rule | None = None,
    layer: Hashable = None,
) -> tuple[Tensor, None]:
    """The gated delta rule along each path: `[1, T, H, K]`, `[1, T, H, V]` → `[1, T, H, V]`.

    Runs of the same depth in the tree are computed together, each from the final state of the run
    that it continues. `rule` is transformers' torch function, which computes one run at a time; on
    CUDA, fla's kernel computes all of them.
    """
    if many is None:
        many = fla_rule if query.is_cuda and has_fla() else functools.partial(_each, rule)
    layout = _given(layout)
    query, key, value, g, beta = (
        split_heads(each, layout, tokens=1, heads=2) for each in (query, key, value, g, beta)
    )
    out = over_levels(
        many,
        query,
        key,
        value,
        g=g,
        beta=beta,
        layout=layout,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        layer=layer,
    )
    return join_heads(out, layout, tokens=1, heads=2), None


def over_levels(
    rule: Rule,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    g: Tensor,
    beta: Tensor,
    layout: Layout,
    use_qk_l2norm_in_kernel: bool = False,
    layer: Hashable = None,
) -> Tensor:
    """`tree_delta_rule` with a rule of many runs."""
    row = (query, key, value, g, beta)
    layout, past = layout.forked, layout.past
    finals = _kept_states(layout, layer, query.device)
    outputs: list[Tensor] = []
    order: list[Tensor] = []
    for level in _levels(layout):
        bounds = [layout.runs[run][:2] for run in level]
        lengths = [stop - start for start, stop in bounds]
        at = torch.cat([torch.arange(*each, device=query.device) for each in bounds]) - past
        parents = [layout.parent_runs[run] for run in level]
        query_L, key_L, value_L, g_L, beta_L = (each[:, at] for each in row)
        out, final_R = rule(
            query_L,
            key_L,
            value_L,
            g=g_L,
            beta=beta_L,
            initial_state=_initial([None if run is None else finals[run] for run in parents]),
            output_final_state=True,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
            bounds=[0, *accumulate(lengths)],
        )
        finals |= dict(zip(level, final_R, strict=True))
        outputs.append(out)
        order.append(at)
    back = torch.cat(order).argsort()
    return _handed_on(torch.cat(outputs, 1)[:, back], layout, layer, finals)


def _initial(states: Sequence[Tensor | None]) -> Tensor | None:
    """`[R, H, K, V]`, 0 for a run that begins a path; None if all do."""
    some = next((state for state in states if state is not None), None)
    if some is None:
        return None
    return torch.stack([torch.zeros_like(some) if each is None else each for each in states])


def _kept_states(layout: Layout, layer: Hashable, device: torch.device) -> dict[int, Tensor]:
    """Run in front → the state after it, for those that own runs continue."""
    if layout.piece is None:
        return {}
    kept = layout.piece.of_past(layer)
    starts = [0, *accumulate(tokens for tokens, _ in kept)]
    found: dict[int, Tensor] = {}
    for (start, _, _), parent in zip(layout.runs, layout.parent_runs, strict=True):
        if start < layout.past or parent is None or parent in found:
            continue
        last = layout.runs[parent][1] - 1
        if last < layout.past:
            segment = bisect_right(starts, last) - 1
            states = kept[segment][1]
            assert states.rows is not None
            at = (states.rows == last - starts[segment]).nonzero()[:, 0]
            found[parent] = read(states, at, 0, device)[0]
    return found


def _handed_on(out: Tensor, layout: Layout, layer: Hashable, finals: dict[int, Tensor]) -> Tensor:
    """Keeps the states where later pieces begin a branch, or ties their gradients to `out`."""
    piece = layout.piece
    if piece is None or not len(piece.forks):
        return out
    ends = {layout.runs[run][1] - 1 - layout.past: run for run in finals}
    forks: list[int] = piece.open_rows[piece.forks].tolist()
    states = torch.stack([finals[ends[row]] for row in forks])
    if not torch.is_grad_enabled():
        piece.keep(layer, states, rows=piece.forks)
        return out
    (kept,) = piece.own(layer)
    return tied(out, states, kept)


def _kept_inputs(
    piece: Piece, layer: Hashable, device: torch.device
) -> tuple[list[Tensor], Tensor]:
    """The kept inputs of the tokens in front, and the index in front of each."""
    inputs: list[Tensor] = []
    rows = [torch.zeros(0, dtype=torch.int64, device=device)]
    start = 0
    for tokens, kept in piece.of_past(layer):
        assert kept.rows is not None
        at = (kept.rows < tokens).nonzero()[:, 0]
        inputs.append(read(kept, at, 2, device))
        rows.append(kept.rows[at].to(device) + start)
        start += tokens
    return inputs, torch.cat(rows)


def _each(rule: Rule, *row: Tensor, bounds: Sequence[int], **options: Any) -> tuple[Tensor, Tensor]:
    """`rule` on each run of a level alone, from its own initial state, stretch by stretch."""
    states = options.pop("initial_state")
    decay, beta = options.pop("g"), options.pop("beta")
    outputs: list[Tensor] = []
    finals: list[Any] = []
    for number, (start, stop) in enumerate(pairwise(bounds)):
        state = None if states is None else states[number, None]
        for first in range(start, stop, STRETCH_TOKENS):
            end = min(first + STRETCH_TOKENS, stop)
            out, state = rule(
                *(each[:, first:end] for each in row),
                g=decay[:, first:end],
                beta=beta[:, first:end],
                initial_state=state,
                **options,
            )
            outputs.append(out)
        finals.append(state)
    return torch.cat(outputs, 1), torch.cat(finals)


def fla_rule(*row: Tensor, bounds: Sequence[int], **options: Any) -> tuple[Tensor, Tensor]:
    """fla's kernel, a rule of many runs."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    at = torch.tensor(bounds, device=row[0].device)
    return chunk_gated_delta_rule(*row, cu_seqlens=at, **options)  # type: ignore[no-any-return]


@functools.lru_cache(maxsize=2)  # for all layers of the micro-batch at hand
def _levels(layout: Layout) -> list[list[int]]:
    """The own runs of the row by their depth in the tree of runs."""
    depths: list[int] = []
    levels: list[list[int]] = []
    for number, parent in enumerate(layout.parent_runs):
        if layout.runs[number][0] < layout.past:
            depths.append(-1)
            continue
        depths.append(0 if parent is None else depths[parent] + 1)
        if depths[-1] == len(levels):
            levels.append([])
        levels[depths[-1]].append(number)
    return levels


@functools.lru_cache(maxsize=2)
def _before(layout: Layout) -> Tensor:
    """`[P + T + 1]`: the token before each token on its path; `P + T` at the start of a path."""
    tokens = layout.row
    return pad(layout.parents.where(layout.parents >= 0, tokens), (0, 1), value=tokens)


def _given(layout: Layout | None) -> Layout:
    if layout is None:
        raise ValueError("the model does not pass the layout of the packed row to linear attention")
    return layout
