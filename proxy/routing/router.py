"""Routes each call to a replica: the one that has the session's prefix, else the least loaded.

Invariant: a replica that has failed is not chosen again until a health check succeeds. The only
exception is an answer's first call when no replica is healthy: then one that failed is tried. Each
replica is checked in a loop of its own, so that a slow check of one delays no other.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Set
from secrets import token_hex

from proxy.engines.protocol import Engine, EngineInfo
from proxy.errors import EngineError, EngineRefusal, MissingAdapter, RequestError
from proxy.records import ServedPolicy
from proxy.routing.blame import Attempt, Blame, Suspicion
from proxy.routing.cache_room import AlwaysRoom, CacheRoom, RoomClaim
from proxy.routing.policies import Policies

_log = logging.getLogger(__name__)


class HealthChecks:
    """Calls `check` for each watched engine at once, then every `interval_s`, and when it is
    suspected. `check` reports what it finds and raises nothing."""

    def __init__(self, check: Callable[[Engine], Awaitable[object]], interval_s: float) -> None:
        self._check = check
        self._interval_s = interval_s
        self._suspicions: dict[Engine, asyncio.Event] = {}
        self._loops: dict[Engine, asyncio.Task[None]] = {}

    def watch(self, engine: Engine) -> None:
        self._suspicions[engine] = asyncio.Event()
        self._loops[engine] = asyncio.create_task(self._keep_checking(engine))

    def suspect(self, engine: Engine) -> None:
        """The engine has failed a call: it is checked now, or again if a check is running."""
        if engine in self._suspicions:
            self._suspicions[engine].set()

    def forget(self, engine: Engine) -> None:
        if engine in self._loops:
            del self._suspicions[engine]
            self._loops.pop(engine).cancel()

    async def close(self) -> None:
        loops = list(self._loops.values())
        for engine in list(self._loops):
            self.forget(engine)
        await asyncio.gather(*loops, return_exceptions=True)

    async def _keep_checking(self, engine: Engine) -> None:
        suspicion = self._suspicions[engine]
        while True:
            suspicion.clear()
            try:
                await self._check(engine)
            except Exception:  # noqa: BLE001 - one error must not end an engine's checks for good
                _log.exception("the check of engine %s raised an error", engine.info.name)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._interval_s):
                    await suspicion.wait()


REMEMBERED_SESSIONS = 100_000
"""With more sessions, the one that was idle longest is forgotten; its next call costs a prefill."""

_log = logging.getLogger(__name__)


class Router:
    """Distributes calls over the engines. `start` begins the health checks, `close` ends them."""

    def __init__(
        self,
        engines: Iterable[Engine],
        *,
        vocab_size: int = 2**31,
        version: int = 0,
        check_interval_s: float = 2.0,
        pause_timeout_s: float = 900.0,
        patience_s: float = 120.0,
        on_failure: Callable[[str, EngineError], None] = lambda engine, error: None,
        admission: CacheRoom | None = None,
        shared: bool = False,
    ) -> None:
        """`vocab_size`: every sampled id is below it. `pause_timeout_s`: how long a call waits for
        `resume` before it is refused. `patience_s`: how long an answer may stand still after its
        replica failed. `on_failure` gets each failed call's engine name and error. `admission`
        decides which sessions may sample; None: all. `shared`: other proxies call the same engines.
        """
        self.policies = Policies()
        self.blame = Blame(shared=shared)
        self._engines = {engine.info.name: engine for engine in engines}
        self._vocab_size = vocab_size
        self._on_failure = on_failure
        self._admission: CacheRoom = admission or AlwaysRoom()
        self._version = version
        self._checks = HealthChecks(self._ask, check_interval_s)
        self._pause_timeout_s = pause_timeout_s
        self._patience_s = patience_s
        self._homes: OrderedDict[str, str] = OrderedDict()
        self._removed: set[Engine] = set()
        self._running = asyncio.Event()
        self._running.set()
        self._joined = asyncio.Event()
        self._started = False

    @property
    def infos(self) -> list[EngineInfo]:
        return [engine.info for engine in self._engines.values()]

    @property
    def version(self) -> int:
        """The version of the weights, for answers of engines that do not report it."""
        return max([self._version, *[engine.info.version for engine in self._engines.values()]])

    @property
    def context_tokens(self) -> int | None:
        """The number of tokens that every replica accepts; None if it is unknown."""
        known = [info.max_context_tokens for info in self.infos if info.max_context_tokens]
        return min(known, default=None)

    @property
    def may_read_images(self) -> bool:
        """Whether any replica prepares images, or may do so once it has been asked, or is still to
        be added."""
        engines = self._engines.values()
        return not engines or any(engine.info.images is not False for engine in engines)

    def image_readers(self) -> list[Engine]:
        """The replicas that prepare images, the healthy and least loaded ones first."""
        readers = [engine for engine in self._engines.values() if engine.info.images]
        return sorted(readers, key=lambda e: (not e.info.healthy, e.info.in_flight))

    def without_images(self) -> Set[Engine]:
        """Implements `Replicas`."""
        return {engine for engine in self._engines.values() if not engine.info.images}

    @property
    def paused(self) -> bool:
        return not self._running.is_set()

    @property
    def waiting(self) -> int:
        """Number of calls that wait for room in an engine's cache."""
        return self._admission.waiting

    @property
    def patience_s(self) -> float:
        """How long an answer may stand still after its replica failed."""
        return self._patience_s

    @property
    def vocab_size(self) -> int:
        """Every sampled id is below it."""
        return self._vocab_size

    def admit_by(self, admission: CacheRoom) -> None:
        """Lets `admission` decide from now on. To be called before `start`."""
        self._admission = admission

    def set_version(self, version: int) -> None:
        self._version = version

    async def publish(self, served: ServedPolicy) -> None:
        """Makes this version of a policy the one that is sampled from. Running calls of another
        version are cut, and continue with this one."""
        outdated = self.policies.publish(served)
        self._wake_waiting_calls()
        cuts = (engine.abort(request_id) for engine, request_id in outdated)
        for failure in await asyncio.gather(*cuts, return_exceptions=True):
            if isinstance(failure, EngineError):
                _log.warning("a call keeps its version of %s: %s", served.name, failure.message)
            elif failure is not None:
                raise failure

    def pause(self) -> None:
        """Calls that have not begun wait; calls that have begun continue."""
        self._running.clear()

    def resume(self) -> None:
        self._running.set()

    async def add(self, engine: Engine) -> None:
        """Raises RequestError if the name is taken."""
        if engine.info.name in self._engines:
            raise RequestError(
                f"name: an engine {engine.info.name!r} exists; choose another name",
                status=409,
            )
        self._engines[engine.info.name] = engine
        if self._started:
            self._checks.watch(engine)
        self._wake_waiting_calls()

    async def remove(self, name: str) -> None:
        """The engine gets no new calls; its calls in flight continue.

        Raises RequestError if there is no engine of this name.
        """
        engine = self._engines.pop(name, None)
        if engine is None:
            known = ", ".join(self._engines) or "none"
            raise RequestError(
                f"name: there is no engine {name!r}; the engines are: {known}", status=404
            )
        self._checks.forget(engine)
        self.blame.settle(engine, self.blame.incident(engine), down=False)
        self._removed.add(engine)
        self._admission.lost(name)
        await self._close_if_removed(engine)

    async def check(self) -> None:
        """Checks every replica. Raises EngineError if none is healthy."""
        engines = list(self._engines.values())
        outcomes = await asyncio.gather(*(self._ask(engine) for engine in engines))
        if not any(outcome is None for outcome in outcomes):
            raise next(iter(outcomes), None) or EngineError(
                "the proxy has no engine; add one with POST /engines, or set `engines`"
            )

    async def start(self) -> None:
        """Checks each replica now, every `check_interval_s` and after each of its failures."""
        self._started = True
        for engine in self._engines.values():
            self._checks.watch(engine)

    async def close(self) -> None:
        self._admission.close()
        self._started = False
        await self._checks.close()
        for engine in self._engines.values():
            self.blame.settle(engine, self.blame.incident(engine), down=False)
        for engine in (*self._engines.values(), *self._removed):
            await engine.close()

    async def until_running(self) -> float:
        """Implements `Replicas`. Raises EngineError after `pause_timeout_s`."""
        if self._running.is_set():
            return 0.0
        loop = asyncio.get_running_loop()
        since = loop.time()
        try:
            async with asyncio.timeout(self._pause_timeout_s):
                await self._running.wait()
        except TimeoutError as error:
            raise EngineError(
                f"engines have been paused for {self._pause_timeout_s:.0f} s; retry later, or"
                " resume them with POST /engines/resume"
            ) from error
        return loop.time() - since

    async def until_joined(self, timeout_s: float) -> None:
        """Implements `Replicas`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._joined.wait()

    @property
    def schedules(self) -> bool:
        """Whether a call may have to wait for room in an engine's cache."""
        return self._admission.active

    async def until_admitted(self, claim: RoomClaim, *, trained: bool, adapted: bool) -> None:
        """Waits until the caches have room for the call. To be called once, before the call's
        generation begins; then `left` must be called when it has ended in any way."""
        if not self._admission.active:
            return

        def usable() -> list[str]:
            serving = [engine.info for engine in self._serving(trained, adapted)]
            healthy = [info.name for info in serving if info.healthy]
            return healthy or [info.name for info in serving if self._admission.knows(info.name)]

        replica = await self._admission.admitted(claim, usable)
        if replica is not None:
            self._homes[claim.session_id] = replica

    def left(self, claim: RoomClaim, path_tokens: int, answer_tokens: int) -> None:
        """The call has ended; its path has this many tokens, the last of which are its answer."""
        if self._admission.active:
            self._admission.ended(claim.session_id, claim.call_id, path_tokens, answer_tokens)

    def closed_to(self, suspicion: Suspicion) -> Set[Engine]:
        """Implements `Replicas`."""
        if not self.blame.has_reserved:
            return frozenset()
        healthy = [engine for engine in self._engines.values() if engine.info.healthy]
        return self.blame.closed_to(suspicion, healthy)

    def choose(
        self,
        session_id: str,
        tried: Set[Engine],
        *,
        trained: bool,
        adapted: bool = False,
        only_healthy: bool,
    ) -> Engine | None:
        """Implements `Replicas`."""
        left = [engine for engine in self._serving(trained, adapted) if engine not in tried]
        healthy = [engine for engine in left if engine.info.healthy]
        # If no replica is healthy, one that failed is tried: it may be back, or only slow.
        usable = healthy if only_healthy else healthy or left
        if not usable:
            return None
        home = self._homes.get(session_id)
        chosen = min(usable, key=lambda e: (e.info.name != home, e.info.in_flight))
        self._homes[session_id] = chosen.info.name
        self._homes.move_to_end(session_id)
        if len(self._homes) > REMEMBERED_SESSIONS:
            self._homes.popitem(last=False)
        return chosen

    def forget(self, session_id: str) -> None:
        """Frees what the router and the replicas keep of a session that has ended."""
        self._homes.pop(session_id, None)
        self._admission.forget(session_id)
        for engine in (*self._engines.values(), *self._removed):
            engine.forget(session_id)

    def serves(self, besides: Set[Engine], *, trained: bool, adapted: bool = False) -> bool:
        """Implements `Replicas`."""
        return any(engine not in besides for engine in self._serving(trained, adapted))

    def version_of(self, engine: Engine) -> int:
        """Implements `Replicas`. A replica's version is known from its health checks and its whole
        answers; a replica that reports none has the newest version that is known."""
        info = engine.info
        return max(self._version, info.version) if info.reports_version else self.version

    def failed(self, engine: Engine, error: EngineError, attempt: Attempt) -> str:
        """Implements `Replicas`. Only the log gets the engine's address and message."""
        name, failure_id = engine.info.name, token_hex(4)
        _log.warning("engine %s failed a call (id %s): %s", name, failure_id, error.message)
        self._on_failure(name, error)
        if isinstance(error, MissingAdapter):
            return failure_id
        engine.info.healthy = False
        self._hold_calls(engine)
        if self._started and self._has(engine):
            self.blame.broken(engine, attempt, error, failure_id)
            self._checks.suspect(engine)
        return failure_id

    def refused(self, engine: Engine, refusal: EngineRefusal) -> RequestError:
        """Implements `Replicas`."""
        refusal_id = token_hex(4)
        _log.warning(
            "engine %s refused a call (id %s): %s", engine.info.name, refusal_id, refusal.message
        )
        return RequestError(
            f"the engine refused the parameters of this call (id {refusal_id}); the proxy's log has"
            " the reason"
        )

    def is_removed(self, engine: Engine) -> bool:
        """Implements `Replicas`."""
        return engine in self._removed

    async def released(self, engine: Engine) -> None:
        """Implements `Replicas`."""
        await self._close_if_removed(engine)

    def _serving(self, trained: bool, adapted: bool) -> Iterator[Engine]:
        for engine in self._engines.values():
            info = engine.info
            if not (trained and info.text_only) and (info.adapters or not adapted):
                yield engine

    async def _close_if_removed(self, engine: Engine) -> None:
        if engine in self._removed and engine.info.in_flight == 0:
            self._removed.discard(engine)
            await engine.close()

    async def _ask(self, engine: Engine) -> EngineError | None:
        """The error of its health check; None if it is healthy."""
        was_healthy, incident = engine.info.healthy, self.blame.incident(engine)
        try:
            await engine.check()
        except EngineError as error:
            self.blame.settle(engine, incident, down=True)
            self._hold_calls(engine)
            if was_healthy:
                _log.warning("engine %s failed its check: %s", engine.info.name, error.message)
            return error
        except Exception:
            engine.info.healthy = False
            self.blame.settle(engine, incident, down=False)
            self._hold_calls(engine)
            raise
        self.blame.settle(engine, incident, down=False)
        if self._has(engine):
            self._admission.report(engine.info.name, engine.info.cache_tokens)
        if not was_healthy:
            _log.info("engine %s is healthy again", engine.info.name)
            self._wake_waiting_calls()
        return None

    def _hold_calls(self, engine: Engine) -> None:
        if self._has(engine):
            self._admission.failed(engine.info.name)

    def _has(self, engine: Engine) -> bool:
        """False if it was removed; another engine may have its name."""
        return self._engines.get(engine.info.name) is engine

    def _wake_waiting_calls(self) -> None:
        self._joined.set()
        self._joined = asyncio.Event()
