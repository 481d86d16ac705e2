"""What the passes over a tree of prefixes hand on: keys, values and states of earlier pieces.

A tree that does not fit into one micro-batch is computed in pieces (`trainer.rows.prefix_tree`).
The tokens of a piece attend to those of earlier pieces on their paths, whose keys and values are
kept per layer. Invariant: what is kept has no graph. A piece that reads it adds the gradient to a
buffer beside it, and the piece that made it adds the buffer to the gradient of its own keys and
values when it is computed for its backward pass, after all pieces that read it. So the sum of the
gradients is that of one pass over the whole tree.

Buffers are float32, whatever the type of the keys: a prefix that a hundred passes read gets a
hundred addends, and a sum in bfloat16 would lose what is smaller than 1/256 of it.

Shapes: `O` kept tokens of a piece, `F` forks among them, `P` tokens before a piece on its path, `T`
tokens of a piece, `H` heads, `D` head size.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from trainer.transfers import sent


@dataclass(slots=True)
class KeptTensor:
    """A kept tensor, and the sum of the gradients of the passes that read it."""

    value: Tensor
    gradient: Tensor | None = None
    """float32, of the same shape; None until a pass with a backward pass reads it."""
    rows: Tensor | None = None
    """`[R]` int64, the kept tokens of the piece that it is of; None: of all, in order."""
    spilled: bool = False
    """Whether it is in the machine's memory because there was no room beside the weights."""

    def buffer(self) -> Tensor | None:
        """The gradient's buffer; None in a pass without a backward pass."""
        if self.gradient is None and torch.is_grad_enabled():
            self.gradient = torch.zeros_like(self.value, dtype=torch.float32)
        return self.gradient


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """Keys and values of one earlier piece, as far as they are on the path of a later one."""

    key: Tensor
    """`[1, H, P, D]`; values may have another head size."""
    value: Tensor
    key_gradient: Tensor | None = None
    """Views of the buffers; None: the gradient is not needed."""
    value_gradient: Tensor | None = None

    def padded(self, size: int) -> Self:
        """The same with zeros up to this head size, which do not reach the buffers."""
        key, value = (pad(x, (0, size - x.shape[-1])) for x in (self.key, self.value))
        return replace(self, key=key, value=value)

    def rows(self, start: int, stop: int) -> Self:
        """Some of its tokens."""
        gradients = (
            None if each is None else each[:, :, start:stop]
            for each in (self.key_gradient, self.value_gradient)
        )
        return type(self)(self.key[:, :, start:stop], self.value[:, :, start:stop], *gradients)

    def to(self, dtype: torch.dtype) -> Self:
        """The same in the type of the keys that stand beside it."""
        return replace(self, key=self.key.to(dtype), value=self.value.to(dtype))

    def add(self, key_gradient: Tensor, value_gradient: Tensor) -> None:
        """Adds the gradients of all of its tokens."""
        buffers = (self.key_gradient, self.value_gradient)
        for buffer, part in zip(buffers, (key_gradient, value_gradient), strict=True):
            if buffer is not None:
                buffer += part[..., : buffer.shape[-1]].to(buffer.device)


def _with_gradient(value: Tensor) -> int:
    return value.nbytes + 4 * value.numel()


@dataclass(slots=True, eq=False)
class Kept:
    """What all pieces of a tree have kept so far."""

    room: int | None = None
    """Bytes of the GPU's memory for it and its gradients; None: all. What is more is in the
    machine's memory, and a copy on the GPU only while a layer reads it."""
    tensors: dict[int, dict[Hashable, tuple[KeptTensor, ...]]] = field(default_factory=dict)
    """Number of a piece → layer → its keys and values, or its states."""
    scores: dict[str, Tensor] = field(default_factory=dict)
    """Name → `[N]`: what the passes so far have found for each trained token of the tree."""
    on_device: int = 0
    """Bytes of what is beside the weights, with buffers for all of its gradients."""

    def keep(
        self, number: int, layer: Hashable, values: Sequence[Tensor], rows: Tensor | None
    ) -> None:
        """Keeps what a piece has of a layer, in place of what it kept of it before."""
        layers = self.tensors.setdefault(number, {})
        self._left(layers.pop(layer, ()))
        layers[layer] = tuple(self._placed(each.detach(), rows) for each in values)

    def _placed(self, value: Tensor, rows: Tensor | None) -> KeptTensor:
        size = _with_gradient(value)
        if self.room is not None and self.on_device + size > self.room:
            return KeptTensor(value.to("cpu"), rows=rows, spilled=True)
        self.on_device += size
        return KeptTensor(value, rows=rows)

    def _left(self, kept: Iterable[KeptTensor]) -> None:
        self.on_device -= sum(_with_gradient(each.value) for each in kept if not each.spilled)

    def free(self, numbers: Sequence[int]) -> None:
        """Frees what these pieces have kept."""
        for number in numbers:
            for each in self.tensors.pop(number, {}).values():
                self._left(each)

    @property
    def size(self) -> int:
        """Bytes of the kept tensors and of their buffers."""
        tensors = (t for layers in self.tensors.values() for each in layers.values() for t in each)
        return sum(
            t.value.nbytes + (0 if t.gradient is None else t.gradient.nbytes) for t in tensors
        )


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """The place of a micro-batch in its tree.

    Example: 5 6 7 8 9 of [5 6 7] and [5 6 8 9] in pieces of 3 tokens. The second, 8 9:
        number = 1    past = ((0, 2),)    open_rows = []    forks = []
    and the first, 5 6 7:
        number = 0    past = ()           open_rows = [0 1]    forks = [1]
    """

    number: int
    past: tuple[tuple[int, int], ...]
    """`(number, tokens)` of each earlier piece on the path to the first token, in order: its first
    kept tokens are on this path."""
    open_rows: Tensor
    """`[O]` int64, the own tokens that later pieces attend to; ascending."""
    forks: Tensor
    """`[F]` int64, those of them after which a later piece begins a branch, as indices in `[O]`."""
    kept: Kept
    reads_only: bool = False
    """Whether the pass computes only what later pieces attend to, without a backward pass."""
    companions: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    """Trained tokens in other pieces of the sequences that are trained here."""
    finished: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    """Trained tokens of the sequences that have no trained token in a pass after this one."""

    def to(self, device: torch.device) -> Self:
        rows, forks = sent(self.open_rows, device), sent(self.forks, device)
        return replace(self, open_rows=rows, forks=forks)

    def entered(
        self, layer: Hashable, *rows: Tensor, dim: int, chosen: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """The tensors of the own tokens (dimension `dim`). Without a backward pass, keeps those of
        the open rows (or of those `chosen` among them); with one, adds to their gradients what
        later pieces have summed."""
        at = self.open_rows if chosen is None else self.open_rows[chosen]
        if not len(at):
            return rows
        if not torch.is_grad_enabled():
            self.keep(layer, *(each.index_select(dim, at) for each in rows), rows=chosen)
            return rows
        kept = self.own(layer)
        if not kept:
            return rows
        return tuple(
            _Injected.apply(each, at, one, dim)  # type: ignore[no-untyped-call]
            for each, one in zip(rows, kept, strict=True)
        )

    def keep(self, layer: Hashable, *values: Tensor, rows: Tensor | None = None) -> None:
        """Keeps the tensors for later pieces."""
        self.kept.keep(self.number, layer, values, rows)

    def reached(self, width: int) -> Tensor:
        """`[R]` int64: the open tokens that the window of a convolution of this width can reach
        from a later piece, as indices in `[O]`."""
        back = torch.arange(width - 1, device=self.forks.device)
        rows = (self.forks[:, None] - back).flatten()
        reached: Tensor = torch.unique(rows[rows >= 0])
        return reached

    def own(self, layer: Hashable) -> tuple[KeptTensor, ...]:
        """What the piece itself has kept of the layer."""
        return self.kept.tensors.get(self.number, {}).get(layer, ())

    def of_past(self, layer: Hashable) -> list[tuple[int, KeptTensor]]:
        """For each earlier piece on the path, its number of tokens on the path and what it has kept
        of a layer that keeps one tensor."""
        return [(tokens, self.kept.tensors[number][layer][0]) for number, tokens in self.past]

    def segments(self, layer: Hashable, device: torch.device) -> tuple[Segment, ...]:
        """The keys and values of the tokens before the piece, in the order of the path."""
        found = []
        for number, tokens in self.past:
            key, value = self.kept.tensors[number][layer]
            views = [each.value[:, :, :tokens].to(device) for each in (key, value)]
            buffers = [each.buffer() for each in (key, value)]
            gradients = [None if each is None else each[:, :, :tokens] for each in buffers]
            found.append(Segment(*views, *gradients))
        return tuple(found)

    def done(self) -> None:
        """Frees what the piece kept, after its backward pass."""
        self.kept.free([self.number])

    def forget_others(self) -> None:
        """Frees what is not on the path to the piece, and what no later piece reads either if the
        pieces are computed in order."""
        own = {number for number, _ in self.past}
        self.kept.free([number for number in self.kept.tensors if number not in own])


def read(kept: KeptTensor, at: Tensor, dim: int, device: torch.device) -> Tensor:
    """The rows `at` of a kept tensor, whose gradient is added to its buffer."""
    value = kept.value.index_select(dim, sent(at, kept.value.device)).to(device)
    buffer = kept.buffer()
    if buffer is None:
        return value
    rows = at.to(buffer.device)

    def add(gradient: Tensor) -> None:
        buffer.index_add_(dim, rows, gradient.to(buffer.device, buffer.dtype))

    value.requires_grad_().register_hook(add)  # type: ignore[no-untyped-call]
    return value


def tied(out: Tensor, states: Tensor, kept: KeptTensor) -> Tensor:
    """`out`, with whose backward pass the states get the gradient that later pieces have summed,
    also if nothing else of the pass reads them."""
    result: Tensor = _Tied.apply(out, states, kept)  # type: ignore[no-untyped-call]
    return result


class _Tied(Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor, states: Tensor, kept: KeptTensor) -> Tensor:
        ctx.kept, ctx.like = kept, (states.shape, states.device, states.dtype)
        return out.view_as(out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        shape, device, dtype = ctx.like
        summed = ctx.kept.gradient
        if summed is None:
            return gradient, torch.zeros(shape, device=device, dtype=dtype), None
        return gradient, summed.to(device, dtype), None


class _Injected(Function):
    @staticmethod
    def forward(ctx: Any, row: Tensor, at: Tensor, kept: KeptTensor, dim: int) -> Tensor:
        ctx.at, ctx.kept, ctx.dim = at, kept, dim
        return row.view_as(row)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        summed = ctx.kept.gradient
        if summed is not None:
            summed = summed.to(gradient.device, gradient.dtype)
            gradient = gradient.index_add(ctx.dim, ctx.at, summed)
        return gradient, None, None, None


def with_past(key: Tensor, value: Tensor, past: Sequence[Segment]) -> tuple[Tensor, Tensor]:
    """Keys and values of the path before the own tokens, and of those: `[1, H, P + T, D]`."""
    if not past:
        return key, value
    joined: tuple[Tensor, Tensor] = _WithPast.apply(key, value, past)  # type: ignore[no-untyped-call]
    return joined


def one_row(parts: Sequence[Tensor], like: Tensor) -> Tensor:
    """The tokens of `[1, H, ·, D]` one behind the other, with heads or tokens first in memory as in
    `like`: kernels are compiled for one order."""
    if like.stride(1) > like.stride(2):
        return torch.cat(tuple(parts), 2)
    return torch.cat([each.transpose(1, 2) for each in parts], 1).transpose(1, 2)


class _WithPast(Function):
    @staticmethod
    def forward(
        ctx: Any, key: Tensor, value: Tensor, past: Sequence[Segment]
    ) -> tuple[Tensor, Tensor]:
        ctx.past = past
        keys = [*(each.key.to(key.dtype) for each in past), key]
        values = [*(each.value.to(value.dtype) for each in past), value]
        return one_row(keys, key), one_row(values, value)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, key_gradient: Tensor, value_gradient: Tensor
    ) -> tuple[Tensor, Tensor, None]:
        start = 0
        for each in ctx.past:
            rows = slice(start, start + each.key.shape[2])
            each.add(key_gradient[:, :, rows], value_gradient[:, :, rows])
            start = rows.stop
        return key_gradient[:, :, start:], value_gradient[:, :, start:], None
