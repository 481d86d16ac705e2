"""A simulated GPU for `benchmarks.scale`: how long an engine takes for a call, in virtual time.

An engine without a host tier answers every call at once, with prefill and decoding shared by all
calls, and drops the path that was unused for longest when its cache is full. With a host tier, it
is simulated more strictly, so that the comparison does not favour the tier:

    a call waits in the engine, first come first served, until its path and those of the calls that
        are sampled fit in the GPU's cache
    what the GPU has dropped is loaded from the host over one link, one call after another, before
        the call is sampled; the link also carries every new token to the host
    the host keeps what the GPU has, too, and drops the path that was unused for longest
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from dataclasses import dataclass, field

from proxy.engines.protocol import Chunk, EngineInfo, PreparedImage, Sampling, Take
from proxy.records import FinishReason, Ids


@dataclass(frozen=True)
class Model:
    """An 8B model on one GPU per replica, and an agent that edits code in a sandbox."""

    turns: int = 20
    new_tokens: int = 800
    """Prompt tokens that a turn adds (a tool's output)."""
    sampled_tokens: int = 300
    agent_median_s: float = 5.0
    """Mean time between two calls; log-normal with sigma 1.2."""
    decode_tokens_s: float = 60.0
    """Decoding speed of one sequence; all sequences together reach at most `batch_tokens_s`."""
    batch_tokens_s: float = 3000.0
    prefill_tokens_s: float = 20_000.0
    cache_tokens: int = 400_000
    """Size of a replica's KV cache: about 35 of these conversations when they are half-way."""
    host_tokens: int = 0
    """Size of a replica's host tier; 0: it has none."""
    link_tokens_s: float = 150_000.0
    """Tokens that the link between GPU and host carries: 22 GB/s at the 147,456 bytes that a token
    of an 8B model takes (36 layers, 8 heads of keys and values of 128, in bfloat16)."""


@dataclass
class Figures:
    """Covers the calls that began after `from_s`, when the caches are warm."""

    from_s: float
    hit_tokens: int = 0
    loaded_tokens: int = 0
    """Those of `hit_tokens` that came from the host tier."""
    prompt_tokens: int = 0
    waits_s: list[float] = field(default_factory=list)
    longest_pause_s: float = 0.0

    def admitted(self, paused_s: float, overdue: bool) -> None:
        self.longest_pause_s = max(self.longest_pause_s, paused_s)


class Paths:
    """The paths in a cache, by session; the one that was unused for longest is dropped first."""

    def __init__(self) -> None:
        self.tokens: OrderedDict[str, int] = OrderedDict()
        self.total = 0

    def take(self, session: str) -> int:
        """The path's tokens, which are not in the cache any more; 0 if it is not in it."""
        held = self.tokens.pop(session, 0)
        self.total -= held
        return held

    def put(self, session: str, tokens: int) -> None:
        self.take(session)
        self.tokens[session] = tokens
        self.total += tokens

    def used(self, session: str) -> None:
        if session in self.tokens:
            self.tokens.move_to_end(session)

    def shrink(self, capacity: int) -> None:
        while self.total > capacity and self.tokens:
            self.total -= self.tokens.popitem(last=False)[1]


class Replica:
    """Answers after the time that prefill and decoding take at its load."""

    def __init__(self, number: int, model: Model, figures: Figures) -> None:
        self.model = model
        self.figures = figures
        self.info = EngineInfo(name=f"gpu-{number}", url="")
        self.info.cache_tokens = max(model.cache_tokens, model.host_tokens)
        self.running = 0
        self.peak = 0
        self._cached = Paths()

    def view(self) -> View:
        return View(self)

    async def answer(self, session: str, prompt: int) -> None:
        """Returns when the answer is complete."""
        self.running += 1
        try:
            held = self._cached.take(session)
            known = min(held, prompt)
            self._count(prompt, known, 0)
            self._cached.put(session, prompt + self.model.sampled_tokens)
            self._cached.shrink(self.model.cache_tokens)
            await asyncio.sleep(self._sampling_s(prompt - known))
        finally:
            self.running -= 1
            self._cached.used(session)

    def _count(self, prompt: int, known: int, loaded: int) -> None:
        if asyncio.get_running_loop().time() > self.figures.from_s:
            self.figures.hit_tokens += known
            self.figures.loaded_tokens += loaded
            self.figures.prompt_tokens += prompt

    def _sampling_s(self, new_tokens: int) -> float:
        self.peak = max(self.peak, self.running)
        rate = min(self.model.decode_tokens_s, self.model.batch_tokens_s / self.running)
        prefill_s = new_tokens / self.model.prefill_tokens_s * self.running
        return prefill_s + self.model.sampled_tokens / rate


class TieredReplica(Replica):
    """A replica with a host tier."""

    def __init__(self, number: int, model: Model, figures: Figures) -> None:
        super().__init__(number, model, figures)
        self._host = Paths()
        self._sampled_tokens = 0
        """Tokens of the paths that are sampled."""
        self._queue: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._link_free_s = 0.0

    async def answer(self, session: str, prompt: int) -> None:
        path = prompt + self.model.sampled_tokens
        await self._fits(path)
        try:
            on_gpu = min(self._cached.take(session), prompt)
            known = max(on_gpu, min(self._host.tokens.get(session, 0), prompt))
            self._count(prompt, known, known - on_gpu)
            self._cached.shrink(self.model.cache_tokens - self._sampled_tokens)
            await asyncio.sleep(self._link_s(known - on_gpu))
            self.running += 1
            try:
                await asyncio.sleep(self._sampling_s(prompt - known))
            finally:
                self.running -= 1
            self._link_s(path - known)
            self._host.put(session, path)
            self._host.shrink(self.model.host_tokens)
            self._cached.put(session, path)
        finally:
            self._sampled_tokens -= path
            self._cached.shrink(self.model.cache_tokens - self._sampled_tokens)
            self._next()

    async def _fits(self, path: int) -> None:
        turn = asyncio.get_running_loop().create_future()
        self._queue.append((path, turn))
        self._next()
        await turn

    def _next(self) -> None:
        while self._queue:
            path, turn = self._queue[0]
            if self._sampled_tokens + path > self.model.cache_tokens and self._sampled_tokens:
                return
            self._queue.popleft()
            self._sampled_tokens += path
            turn.set_result(None)

    def _link_s(self, tokens: int) -> float:
        """Seconds until the link has carried these tokens, after all before them."""
        now_s = asyncio.get_running_loop().time()
        self._link_free_s = max(now_s, self._link_free_s) + tokens / self.model.link_tokens_s
        return self._link_free_s - now_s


def replica(number: int, model: Model, figures: Figures) -> Replica:
    kind = TieredReplica if model.host_tokens else Replica
    return kind(number, model, figures)


class View:
    """A replica as one proxy sees it: the calls in flight are those of this proxy. Implements
    `Engine`."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self.info = EngineInfo(name=replica.info.name, url="")
        self.info.cache_tokens = replica.info.cache_tokens

    async def generate(
        self,
        prompt_ids: Ids,
        sampling: Sampling,
        take: Take,
        *,
        request_id: str,
        cache_salt: str | None = None,
        stream: bool = True,
    ) -> None:
        self.info.in_flight += 1
        try:
            await self._replica.answer(request_id, len(prompt_ids))
        finally:
            self.info.in_flight -= 1
        take(Chunk([1], [-1.0], finish_reason=FinishReason.STOP))

    async def prepare(self, data: bytes, media_type: str) -> PreparedImage:
        raise NotImplementedError

    async def abort(self, request_id: str) -> None: ...

    def forget(self, session_id: str) -> None: ...

    async def check(self) -> None: ...

    async def close(self) -> None: ...
