"""A GPU for tests on a machine without one: it computes on the CPU and checks what a GPU would not.

A `CardTensor` has its numbers in the machine's memory and says that it is on `cuda:N`. Within
`pretended()`, tensors that are made or moved there are of this class, `torch.cuda` answers for it,
and these are errors:

- an operation on tensors of two devices, as on a GPU (`WrongDeviceError`);
- a use of what another stream, or a copy to or from the machine's memory, has not finished, which a
  GPU does silently (`TooEarlyError`).

An operation belongs to the current stream, and is known to be finished after the stream, or an
event that follows it, was synchronized; a blocking copy to the machine synchronizes its stream.
`Card.allocator` counts each device's memory as torch's caching allocator does.
"""

from __future__ import annotations

import traceback
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.utils import clip_grad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map

MIB = 2**20
HOST = torch.device("cpu")
OURS = "/trainer/"
"""In the paths of files whose lines are named."""


class WrongDeviceError(RuntimeError):
    """An operation has tensors of two devices."""


class TooEarlyError(RuntimeError):
    """Memory is used before the stream that uses it has finished."""


class CardTensor(Tensor):
    """A tensor on the card; `on_host` has its numbers."""

    on_host: Tensor
    card_device: torch.device
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, real: Tensor, where: torch.device) -> CardTensor:
        made: CardTensor = Tensor._make_wrapper_subclass(
            cls,
            real.shape,
            strides=real.stride(),
            storage_offset=real.storage_offset(),
            dtype=real.dtype,
        )
        made.on_host, made.card_device = real, where
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, _types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise AssertionError(f"{func}: a tensor of the card outlives `pretended()`")

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self.card_device

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    def get_device(self) -> int:
        return self.card_device.index

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"CardTensor({list(self.shape)}, {self.card_device})"


class Stream:
    """A stream of the card: numbers its operations, and knows which of other streams precede."""

    def __init__(self, device: Any = None, **_: Any) -> None:
        self.device = torch.device("cuda", torch.device(device or "cuda").index or 0)
        self.issued = 0
        self.finished = 0
        """Number of its operations that the host knows to be done."""
        self.after: dict[Stream, int] = {}
        """Operations of other streams for which this one has waited."""

    def synchronize(self) -> None:
        self.finished = self.issued
        for other, number in self.after.items():
            other.finished = max(other.finished, number)

    def wait_stream(self, other: Stream) -> None:
        self._wait(other, other.issued)

    def wait_event(self, event: Event) -> None:
        if event.stream is not None:
            self._wait(event.stream, event.number)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def _wait(self, other: Stream, number: int) -> None:
        self.after[other] = max(self.after.get(other, 0), number)
        for third, earlier in other.after.items():
            self.after[third] = max(self.after.get(third, 0), earlier)


class Event:
    def __init__(self, **_: Any) -> None:
        self.stream: Stream | None = None
        self.number = 0

    def record(self, stream: Stream | None = None) -> None:
        self.stream = stream or torch.cuda.current_stream()  # type: ignore[assignment]
        assert self.stream is not None
        self.number = self.stream.issued

    def synchronize(self) -> None:
        if self.stream is not None:
            self.stream.finished = max(self.stream.finished, self.number)

    def query(self) -> bool:
        return self.stream is None or self.stream.finished >= self.number


@dataclass
class Segment:
    """Memory that the allocator has from the driver: offset → (bytes, whether it is used)."""

    size: int
    blocks: dict[int, tuple[int, bool]]


@dataclass
class Allocator:
    """torch's caching allocator (`CUDACachingAllocator.cpp`): small and large segments, whose
    blocks are split and merged; the best fit is used."""

    segments: list[Segment] = field(default_factory=list)
    allocated: int = 0
    peak: int = 0
    reserved_peak: int = 0

    @property
    def reserved(self) -> int:
        """Bytes that nobody else can use."""
        return sum(segment.size for segment in self.segments)

    def take(self, size: int) -> tuple[Segment, int]:
        size = max(512, -(-size // 512) * 512)
        small = size <= MIB
        free = [
            (length, number, offset)
            for number, segment in enumerate(self.segments)
            if (segment.size == 2 * MIB) == small
            for offset, (length, used) in segment.blocks.items()
            if not used and length >= size
        ]
        if free:
            length, number, offset = min(free)
            segment = self.segments[number]
        else:
            length = 2 * MIB if small else 20 * MIB
            if size >= 10 * MIB:
                length = -(-size // (2 * MIB)) * 2 * MIB
            segment, offset = Segment(length, {}), 0
            self.segments.append(segment)
        splits = length - size >= (512 if small else MIB + 1)
        taken = size if splits else length
        segment.blocks[offset] = taken, True
        if splits:
            segment.blocks[offset + size] = length - size, False
        self.allocated += taken
        self.peak = max(self.peak, self.allocated)
        self.reserved_peak = max(self.reserved_peak, self.reserved)
        return segment, offset

    def give(self, segment: Segment, offset: int) -> None:
        size, _ = segment.blocks[offset]
        self.allocated -= size
        segment.blocks[offset] = size, False
        merged: dict[int, tuple[int, bool]] = {}
        last = None
        for at, (length, used) in sorted(segment.blocks.items()):
            if last is not None and not used and not merged[last][1]:
                merged[last] = merged[last][0] + length, False
            else:
                merged[at], last = (length, used), at
        segment.blocks = merged

    def empty_cache(self) -> None:
        self.segments = [
            each for each in self.segments if any(used for _, used in each.blocks.values())
        ]


@dataclass
class Use:
    """What streams do with a piece of memory: the operation that wrote it, and those that read it
    since."""

    written: tuple[Stream, int] | None = None
    read: dict[Stream, int] = field(default_factory=dict)


class Card:
    """GPUs of this machine. Example: with pretended(2) as card: Policy(…, device="cuda:1")"""

    def __init__(self, count: int) -> None:
        self.count = count
        self.current = 0
        self.streams = {n: Stream(f"cuda:{n}") for n in range(count)}
        self.allocators = [Allocator() for _ in range(count)]
        self.calls: list[str] = []
        """Names of the functions of `torch.cuda` that were called, in order."""
        self.waits: list[str] = []
        """Where the host has waited for the card: the operation, and the line of ours."""
        self._uses: dict[int, Use] = {}
        """By the address of a storage."""
        self._pinned: set[int] = set()
        self._known: set[int] = set()
        self.asked: list[torch.device | None] = []
        """Devices that callers have named, the innermost last."""

    @property
    def allocator(self) -> Allocator:
        return self.allocators[0]

    def stream_of(self, device: torch.device) -> Stream:
        return self.streams[device.index]

    # Tensors

    def on(self, real: Tensor, device: torch.device) -> CardTensor:
        """The tensor as one of the card, whose memory is counted until it is freed."""
        storage = real.untyped_storage()
        key = _key(real)
        if key not in self._known and storage.nbytes():
            self._known.add(key)
            taken = self.allocators[device.index].take(storage.nbytes())
            give = partial(self._freed, key, device.index, taken)
            weakref.finalize(storage, give).atexit = False
        return CardTensor(real, device)

    def _freed(self, key: int, device: int, taken: tuple[Segment, int]) -> None:
        self._known.discard(key)
        self.allocators[device].give(*taken)

    def pin(self, host: Tensor) -> Tensor:
        self._pinned.add(key := _key(host))
        weakref.finalize(host.untyped_storage(), self._pinned.discard, key).atexit = False
        return host

    def is_pinned(self, host: Tensor) -> bool:
        return _key(host) in self._pinned

    # Order

    def host_reads(self, tensor: Tensor, what: Any) -> None:
        use = self._uses.get(_key(tensor))
        if use is not None and not _done(use.written, None):
            raise TooEarlyError(f"{what} reads memory to which a stream still copies")

    def host_writes(self, tensor: Tensor, what: Any) -> None:
        use = self._uses.get(_key(tensor))
        if use is None:
            return
        self.host_reads(tensor, what)
        if not all(_done(each, None) for each in use.read.items()):
            raise TooEarlyError(f"{what} changes memory that a stream still reads")
        use.written, use.read = None, {}

    def _use(self, tensor: Tensor) -> Use:
        if (key := _key(tensor)) not in self._uses:
            self._uses[key] = Use()
            forget = weakref.finalize(tensor.untyped_storage(), self._uses.pop, key, None)
            forget.atexit = False
        return self._uses[key]

    def reads(self, stream: Stream, tensor: Tensor, what: Any) -> None:
        use = self._use(tensor)
        if not _done(use.written, stream):
            raise TooEarlyError(f"{what} reads what another stream has not finished")
        use.read[stream] = stream.issued + 1

    def writes(self, stream: Stream, tensor: Tensor, what: Any) -> None:
        use = self._use(tensor)
        if not _done(use.written, stream) or not all(
            _done(each, stream) for each in use.read.items()
        ):
            raise TooEarlyError(f"{what} changes what another stream still uses")
        use.written, use.read = (stream, stream.issued + 1), {}

    # Operations

    def moved(self, source: Tensor, target: torch.device, dtype: torch.dtype, late: bool) -> Tensor:
        """A copy on another device; `late`: `non_blocking`."""
        real = source.on_host if isinstance(source, CardTensor) else source
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            copy = real.to(dtype, copy=True)
            result = copy if target.type == "cpu" else self.on(copy, target)
        self._transfers(result, source, late, "Tensor.to")
        return result

    def _transfers(self, into: Tensor, source: Tensor, late: bool, what: Any) -> None:
        card = source if isinstance(source, CardTensor) else into
        assert isinstance(card, CardTensor)
        stream = self.stream_of(card.card_device)
        if isinstance(source, CardTensor):
            self.reads(stream, source.on_host, what)
        else:
            self.reads(stream, source, what)
        self.writes(stream, into.on_host if isinstance(into, CardTensor) else into, what)
        stream.issued += 1
        host = source if isinstance(into, CardTensor) else into
        # CUDA copies from pageable memory before it returns.
        late = late and (host is into or self.is_pinned(host))
        if not late:
            self._waited(what)
            stream.synchronize()

    def _waited(self, what: Any) -> None:
        names = [f"{each.filename}:{each.lineno}" for each in traceback.extract_stack()]
        ours = [each for each in names if OURS in each and __file__ not in each]
        self.waits.append(f"{what} at {ours[-1] if ours else names[-1]}")

    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        flat = [each for each in tree_flatten((args, kwargs))[0] if isinstance(each, Tensor)]
        cards = [each for each in flat if isinstance(each, CardTensor)]
        name = func.overloadpacket.__name__
        wanted = self._wanted(func, kwargs, cards)
        if name == "copy_" and len({each.device for each in args[:2]}) > 1:
            return self._copied(*args, **kwargs)
        if name == "_to_copy" and not cards and wanted is not None:
            kind = kwargs.get("dtype") or args[0].dtype
            return self.moved(args[0], wanted, kind, kwargs.get("non_blocking", False))
        if not cards and wanted is None:
            return self._on_host(func, args, kwargs, flat)
        device = cards[0].card_device if cards else wanted or HOST
        indices = args[1] if name in _INDEXED else ()
        for each in flat:
            moves = each.dim() == 0 or any(each is index for index in indices)
            if each.device != device and not (each.device.type == "cpu" and moves):
                raise WrongDeviceError(
                    f"{func}: expected all tensors to be on the same device, but found at least "
                    f"two: {device} and {each.device}"
                )
        return self._on_card(func, args, kwargs, device if wanted is None else wanted)

    def _wanted(self, func: Any, kwargs: Any, cards: Any) -> torch.device | None:
        """The card on which an operation is to make its result; None: where its tensors are."""
        wanted = kwargs.get("device")
        if wanted is not None and torch.device(wanted).type == "cuda":
            wanted = torch.device(wanted)
            return torch.device("cuda", self.current if wanted.index is None else wanted.index)
        asked = self.asked[-1] if self.asked else None
        if wanted is not None and cards and asked is not None and asked.type == "cpu":
            return HOST
        return None

    def _copied(self, into: Tensor, source: Tensor, late: bool = False, **_: Any) -> Tensor:
        real = [each.on_host if isinstance(each, CardTensor) else each for each in (into, source)]
        torch.ops.aten.copy_.default(*real)
        if source.dim() or isinstance(source, CardTensor):
            self._transfers(into, source, late, "copy_")
        return into

    def _on_host(self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor]) -> Any:
        pins = kwargs.pop("pin_memory", None) if "pin_memory" in kwargs else None
        changed = _changed(func, args, kwargs)
        for each in tensors:
            if each.is_meta or _is_view(func):
                continue
            if any(each is other for other in changed):
                self.host_writes(each, func)
            else:
                self.host_reads(each, func)
        out = func(*args, **kwargs)
        return self.pin(out) if pins else out

    def _on_card(self, func: Any, args: Any, kwargs: Any, device: torch.device) -> Any:
        pins = kwargs.pop("pin_memory", None)
        if "device" in kwargs:
            kwargs = kwargs | {"device": "cpu"}
        changed = _changed(func, args, kwargs)
        inputs: dict[int, CardTensor] = {}

        def real(each: Any) -> Any:
            if isinstance(each, CardTensor):
                inputs[id(each)] = each
                return each.on_host
            return each

        given = tree_map(real, (args, kwargs))
        if func.overloadpacket.__name__ == "histc":  # which a CPU has of floats only
            counted, *bounds = given[0]
            out = func(counted.float(), *bounds, **given[1]).to(counted.dtype)
        else:
            out = func(*given[0], **given[1])
        host = device.type == "cpu"
        if not _is_view(func):
            stream = self.stream_of(next(iter(inputs.values())).card_device if inputs else device)
            for each in inputs.values():
                if not any(each is other for other in changed):
                    self.reads(stream, each.on_host, func)
            for each in changed:
                if isinstance(each, CardTensor):
                    self.writes(stream, each.on_host, func)
        by_real = {id(each.on_host): each for each in inputs.values()}

        def wrapped(each: Any) -> Any:
            if not isinstance(each, Tensor):
                return each
            if id(each) in by_real:
                return by_real[id(each)]
            if host:
                return self.pin(each) if pins else each
            made = self.on(each, device)
            if not _is_view(func):
                self.writes(stream, each, func)
            return made

        result = tree_map(wrapped, out)
        if not _is_view(func):
            stream.issued += 1
        gives_value = not isinstance(out, Tensor | list | tuple | None)
        # a mask of an index becomes indices, of which the host must know how many there are
        masked = func.overloadpacket.__name__ in _INDEXED and any(
            isinstance(each, Tensor) and each.dtype == torch.bool for each in args[1]
        )
        name = func.overloadpacket.__name__
        # CUDA has a kernel for bfloat16; else it reads the bounds of the groups
        by_one = name in _GROUPED and any(each.dtype != torch.bfloat16 for each in args[:2])
        if gives_value or masked or by_one or name in _BLOCKING:
            self._waited(func)
            stream.synchronize()
        return result


_INDEXED = {"index", "index_put", "index_put_", "_index_put_impl_"}
"""Operations that take their indices from the machine's memory, too."""
_BLOCKING = {"nonzero", "masked_select", "_unique2", "unique_dim", "grouped_mm_fallback"}
_GROUPED = {"_grouped_mm"}
"""Products of groups of rows, whose bounds are on the card."""


class _Moved(Function):
    """A copy to another device, whose gradient goes back."""

    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, card: Card, target: torch.device, dtype: torch.dtype, late: bool
    ) -> Tensor:
        ctx.card, ctx.source, ctx.dtype = card, tensor.device, tensor.dtype
        return card.moved(tensor, target, dtype, late)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        back = ctx.card.moved(gradient, ctx.source, ctx.dtype, False)
        return back, None, None, None, None


class _Dispatch(TorchDispatchMode):
    def __init__(self, card: Card) -> None:
        super().__init__()
        self.card = card

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.card.run(func, args, dict(kwargs or {}))


class _Named(TorchFunctionMode):
    """What Python asks for by a tensor's method or a function's `device`."""

    def __init__(self, card: Card) -> None:
        super().__init__()
        self.card = card

    def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if args and isinstance(args[0], Tensor) and not name.startswith("_"):
            method = getattr(_Methods, name, None)
            found = NotImplemented if method is None else method(self.card, *args, **kwargs)
            if found is not NotImplemented:
                return found
        asked = kwargs.get("device")
        self.card.asked.append(None if asked is None else torch.device(asked))
        try:
            return func(*args, **kwargs)
        finally:
            self.card.asked.pop()


class _Methods:
    """Methods of tensors that only the card can answer."""

    @staticmethod
    def to(card: Card, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], Tensor):
            args = (args[0].device, args[0].dtype, *args[1:])
        copy = kwargs.pop("copy", False)
        device, dtype, late, _ = torch._C._nn._parse_to(*args, **kwargs)
        if device is not None and device.type == "cuda" and device.index is None:
            device = torch.device("cuda", card.current)
        dtype = dtype or tensor.dtype
        if device is None or device == tensor.device:
            if not isinstance(tensor, CardTensor):
                return NotImplemented
            if dtype == tensor.dtype and not copy:
                return tensor
            return torch.ops.aten._to_copy.default(tensor, dtype=dtype)
        if device.type == "meta":
            return NotImplemented
        return _Moved.apply(tensor, card, device, dtype, late)

    @staticmethod
    def cpu(card: Card, tensor: Tensor, **_: Any) -> Any:
        return _Methods.to(card, tensor, HOST)

    @staticmethod
    def cuda(card: Card, tensor: Tensor, device: Any = None, **_: Any) -> Any:
        return _Methods.to(card, tensor, torch.device("cuda", card.current if not device else 0))

    @staticmethod
    def numpy(card: Card, tensor: Tensor, **_: Any) -> Any:
        if isinstance(tensor, CardTensor):
            raise TypeError("can't convert cuda:0 device type tensor to numpy; use Tensor.cpu()")
        card.host_reads(tensor, "numpy")
        return NotImplemented

    @staticmethod
    def tolist(card: Card, tensor: Tensor) -> Any:
        if isinstance(tensor, CardTensor):
            return _Methods.cpu(card, tensor.detach()).tolist()
        card.host_reads(tensor, "tolist")
        return NotImplemented

    @staticmethod
    def is_pinned(card: Card, tensor: Tensor, **_: Any) -> bool:
        return not isinstance(tensor, CardTensor) and card.is_pinned(tensor)

    @staticmethod
    def pin_memory(card: Card, tensor: Tensor, **_: Any) -> Tensor:
        return card.pin(tensor.clone())


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _done(use: tuple[Stream, int] | None, by: Stream | None) -> bool:
    """Whether the operation is finished before what stream `by` (None: the host) does next."""
    if use is None:
        return True
    stream, number = use
    return (
        stream is by
        or stream.finished >= number
        or (by is not None and by.after.get(stream, 0) >= number)
    )


def _is_view(func: Any) -> bool:
    return bool(getattr(func, "is_view", False)) or func in (
        torch.ops.aten.detach.default,
        torch.ops.aten._unsafe_view.default,
    )


def _changed(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """The arguments that the operation writes to."""
    found: list[Any] = []
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        given = args[number] if number < len(args) else kwargs.get(argument.name)
        found += given if isinstance(given, list | tuple) else [given]
    return [each for each in found if isinstance(each, Tensor)]


def _module_to(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
    """`nn.Module.to`, which keeps tied weights."""
    seen: dict[int, nn.Parameter] = {}
    for part in module.modules():
        for name, weight in list(part._parameters.items()):
            if weight is not None:
                if id(weight) not in seen:
                    moved = weight.detach().to(*args, **kwargs)
                    seen[id(weight)] = nn.Parameter(moved, weight.requires_grad)
                part._parameters[name] = seen[id(weight)]
        for name, buffer in list(part._buffers.items()):
            if buffer is not None:
                part._buffers[name] = buffer.to(*args, **kwargs)
    return module


def _by_device(lists: list[list[Tensor]]) -> dict[Any, Any]:
    """As torch's own, which is compiled and sees that the numbers are in the machine's memory."""
    groups: dict[Any, Any] = {}
    for column in zip(*lists, strict=True):
        key = column[0].device, column[0].dtype
        found, _ = groups.setdefault(key, ([[] for _ in lists], []))
        for values, value in zip(found, column, strict=True):
            values.append(value)
    return groups


@contextmanager
def pretended(count: int = 1, memory: int = 80 * 2**30) -> Iterator[Card]:
    """A machine with this number of GPUs of `memory` bytes."""
    card = Card(count)

    def number(device: Any) -> int:
        if device is None:
            return card.current
        return device if isinstance(device, int) else torch.device(device).index or 0

    @contextmanager
    def stream(chosen: Stream | None) -> Iterator[None]:
        if chosen is None:
            yield
            return
        before = card.streams[chosen.device.index]
        card.streams[chosen.device.index] = chosen
        try:
            yield
        finally:
            card.streams[chosen.device.index] = before

    @contextmanager
    def device(chosen: Any) -> Iterator[None]:
        before, card.current = card.current, number(chosen)
        try:
            yield
        finally:
            card.current = before

    made: list[Stream] = list(card.streams.values())

    class OwnStream(Stream):
        def __init__(self, device: Any = None, **named: Any) -> None:
            super().__init__(f"cuda:{number(device)}", **named)
            made.append(self)

    def synchronize(device: Any = None) -> None:
        card.calls.append("synchronize")
        for each in made:
            if each.device.index == number(device):
                each.synchronize()

    def empty_cache() -> None:
        card.calls.append("empty_cache")
        for each in card.allocators:
            each.empty_cache()

    class OnHost(torch.Generator):
        def __new__(cls, *_: Any) -> OnHost:
            return super().__new__(cls)

    def properties(*_: Any) -> SimpleNamespace:
        return SimpleNamespace(name="a card", total_memory=memory, major=9, minor=0, uuid="0")

    answers: dict[str, Any] = {
        "_lazy_init": lambda: None,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: count,
        "current_device": lambda: card.current,
        "set_device": lambda chosen: setattr(card, "current", number(chosen)),
        "get_device_properties": properties,
        "get_device_name": lambda *_: "a card",
        "get_device_capability": lambda *_: (9, 0),
        "current_stream": lambda device=None: card.streams[number(device)],
        "stream": stream,
        "device": device,
        "Stream": OwnStream,
        "Event": Event,
        "synchronize": synchronize,
        "empty_cache": empty_cache,
        "memory_allocated": lambda device=None: card.allocators[number(device)].allocated,
        "memory_reserved": lambda device=None: card.allocators[number(device)].reserved,
        "max_memory_allocated": lambda device=None: card.allocators[number(device)].peak,
        "get_rng_state_all": list,
    }

    def asked_of_host(function: Any) -> Any:
        """The function, whose first argument is a kind of device."""
        return lambda kind, *args, **named: function(
            "cpu" if kind == "cuda" else kind, *args, **named
        )

    with ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(patch.object(torch.cuda, name, answer))
        stack.enter_context(
            patch.object(torch.accelerator, "current_device_index", lambda: card.current)
        )
        stack.enter_context(patch.object(torch, "Generator", OnHost))
        stack.enter_context(
            patch.object(clip_grad, "_group_tensors_by_device_and_dtype", _by_device)
        )
        for name in ("autocast", "is_autocast_enabled", "get_autocast_dtype"):
            stack.enter_context(patch.object(torch, name, asked_of_host(getattr(torch, name))))
        stack.enter_context(patch.object(nn.Module, "to", _module_to))
        stack.enter_context(_Dispatch(card))
        stack.enter_context(_Named(card))
        yield card
