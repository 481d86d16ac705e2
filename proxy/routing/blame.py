"""Which call takes its engines down, found by letting suspects begin alone.

    TRUSTED ─▶ SUSPECT ─▶ GUILTY
       ▲          │
       └──────────┘  it has run for TRUSTED_S, or the engine turned out to be alive

An engine that breaks its calls is checked at once; only if the check fails, it was taken down.
Its suspects are the calls that had no token from it, however long they had waited for it; if there
are none, those that had begun less than TRUSTED_S before. A suspect continues at an engine that is
reserved for it until its first token, or for UNPROVEN_S. If the engine is taken down then, the
suspect alone is suspected again. Everyone else's calls continue at the other engines. Once each
suspect has had a token there, it was none of them in its first step: the calls that stood beside
them, with tokens, have lost that engine too.

GUILTY  the call has been a suspect ENGINES_LOST times, the last time alone and before it had a
        token; or ENGINES_LOST_LATE times, more often than every other suspect of the last one. The
        second bound is higher because engines that die for another reason may meet the same long
        answer twice. It also holds where other proxies call the same engines, because nobody is
        known to be alone there. The call ends, and calls of the same prompt are refused for
        REMEMBERED_S.

Invariant: at most half of the healthy engines are reserved, or the only one, and each of them only
while its suspect is unproven. A call is never blamed for an engine that it did not reach, nor for
one that had failed before it came: the server of a dead engine may answer for a while.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Collection, Set
from dataclasses import dataclass, field

from proxy.engines.protocol import Engine
from proxy.errors import EngineError, MissingAdapter, RequestError, UnreachableEngine
from proxy.records import Ids

ENGINES_LOST = 2
ENGINES_LOST_LATE = 3
UNPROVEN_S = 2.0
"""A request that kills its engine does so in its first step, which is a moment after it arrives at
an engine that is not busy. This bounds how long others wait, and acquits nobody."""
TRUSTED_S = 30.0
REMEMBERED_S = 600.0
REMEMBERED_PROMPTS = 1024


@dataclass(eq=False, slots=True)
class Suspicion:
    """What is known against one answer's calls."""

    prompt_ids: Ids
    """The ids of the prompt, `[P]`, by which an equal request is known."""
    suspected_of: list[Incident] = field(default_factory=list)
    """Those in which an engine was taken down, and the call was a suspect."""
    beside: list[Incident] = field(default_factory=list)
    """Those in which an engine was taken down while this call had tokens and others had none."""
    guilty: bool = False
    incident: Incident | None = None
    """The last one in which the call was a suspect, until it is settled."""

    @property
    def prompt(self) -> bytes:
        """What identifies an equal request. A copy of all ids, made only where one is looked up."""
        return self.prompt_ids.tobytes()

    @property
    def lost(self) -> list[str]:
        """Log ids of the failures that took an engine down, and may have been this call's."""
        beside = [each for each in self.beside if not each.unproven]
        return [each.failure_id for each in (*self.suspected_of, *beside)]

    @property
    def suspected(self) -> bool:
        return bool(self.lost) or self.incident is not None


@dataclass(eq=False, slots=True)
class Incident:
    """An engine broke its calls, and it is not known yet whether it is alive."""

    failure_id: str
    suspects: list[Attempt]
    beside: list[Attempt]
    """The calls with tokens, where the suspects had none and are suspected first."""
    unproven: set[Suspicion] = field(default_factory=set)
    """The suspects that have had no token since."""
    settled: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(eq=False, slots=True)
class Attempt:
    """One call of an engine; a context in which it samples for the answer."""

    blame: Blame
    engine: Engine
    suspicion: Suspicion
    begun_at: float = 0.0
    found_healthy: bool = False
    """Whether the engine had not failed since its last check when the attempt began."""
    has_tokens: bool = False
    timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> Attempt:
        self.blame.begin(self)
        return self

    def __exit__(self, *_: object) -> None:
        self.blame.end(self)


class Blame:
    """The calls that run at each engine, and who is suspected of having taken one down."""

    def __init__(self, *, shared: bool = False) -> None:
        """`shared`: calls of other proxies run at the same engines, so that a suspect that is alone
        here may not be alone there."""
        self._shared = shared
        self._running: dict[Engine, set[Attempt]] = {}
        self._reserved: dict[Engine, Suspicion] = {}
        self._incidents: dict[Engine, Incident] = {}
        self._guilty: OrderedDict[bytes, float] = OrderedDict()
        self._changed = asyncio.Event()

    @property
    def has_reserved(self) -> bool:
        """Whether an engine is reserved for a suspect."""
        return bool(self._reserved)

    def running(self, engine: Engine) -> Set[Attempt]:
        """The calls that the engine samples for now."""
        return self._running.get(engine, frozenset())

    def begin(self, attempt: Attempt) -> None:
        """The engine begins to sample."""
        loop, engine = asyncio.get_running_loop(), attempt.engine
        attempt.begun_at = loop.time()
        attempt.found_healthy = engine.info.healthy
        self._running.setdefault(engine, set()).add(attempt)
        if self._reserved.get(engine) is attempt.suspicion:
            attempt.timer = loop.call_later(UNPROVEN_S, self._free, engine, attempt.suspicion)

    def end(self, attempt: Attempt) -> None:
        """The engine has answered or failed."""
        running = self._running[attempt.engine]
        running.discard(attempt)
        if not running:
            del self._running[attempt.engine]
        if attempt.timer is not None:
            attempt.timer.cancel()
        if self._reserved:
            self._free(attempt.engine, attempt.suspicion)

    def sampled(self, engine: Engine, attempt: Attempt) -> None:
        """The engine has sampled tokens. Called for each chunk."""
        if not attempt.has_tokens:
            attempt.has_tokens = True
            if self._reserved:
                self._free(engine, attempt.suspicion)
            for incident in attempt.suspicion.suspected_of:
                incident.unproven.discard(attempt.suspicion)
        suspicion = attempt.suspicion
        met_a_loss = suspicion.suspected_of or suspicion.beside
        if met_a_loss and self._age_s(attempt) >= TRUSTED_S:
            suspicion.suspected_of.clear()
            suspicion.beside.clear()

    def broken(self, engine: Engine, attempt: Attempt, error: EngineError, failure_id: str) -> None:
        """The engine broke `attempt`, and is going to be checked. The first call that breaks names
        the suspects, because the others follow."""
        reached = not isinstance(error, MissingAdapter | UnreachableEngine) and error.status != 502
        if engine in self._incidents or not reached:
            return
        running = {each for each in (*self.running(engine), attempt) if each.found_healthy}
        if not running:
            return
        suspects = [each for each in running if not each.has_tokens]
        others = running.difference(suspects)
        beside = [each for each in others if self._age_s(each) < TRUSTED_S]
        if not suspects:
            suspects, beside = beside, []
        incident = self._incidents[engine] = Incident(failure_id, suspects, beside)
        for each in suspects:
            each.suspicion.incident = incident

    def incident(self, engine: Engine) -> Incident | None:
        """What a check that begins now settles."""
        return self._incidents.get(engine)

    def settle(self, engine: Engine, incident: Incident | None, *, down: bool) -> None:
        """`incident` of the engine is settled: the engine was taken down, or it is alive."""
        if incident is None or self._incidents.get(engine) is not incident:
            return
        del self._incidents[engine]
        for attempt in incident.suspects:
            attempt.suspicion.incident = None
            if down:
                attempt.suspicion.suspected_of.append(incident)
                incident.unproven.add(attempt.suspicion)
        for attempt in incident.beside if down else ():
            attempt.suspicion.beside.append(incident)
        ranked = sorted(incident.suspects, key=lambda each: len(each.suspicion.lost), reverse=True)
        if down and ranked:
            first, others = ranked[0], ranked[1:]
            late = first.has_tokens or bool(others) or self._shared
            enough = len(first.suspicion.lost) >= (ENGINES_LOST_LATE if late else ENGINES_LOST)
            if enough and all(len(e.suspicion.lost) < len(first.suspicion.lost) for e in others):
                self._convict(first.suspicion)
        incident.settled.set()
        self._wake()

    async def judged(self, suspicion: Suspicion) -> None:
        """Waits until it is known whether the call took its last engine down.

        Raises RequestError if it, or an equal request, has taken down too many.
        """
        while suspicion.incident is not None:
            await suspicion.incident.settled.wait()
        if suspicion.guilty or (self._guilty and self._is_remembered(suspicion.prompt)):
            raise _refusal(suspicion)

    def closed_to(self, suspicion: Suspicion, engines: Collection[Engine]) -> Set[Engine]:
        """Those of the healthy `engines` at which the call may not begin now."""
        if not self._reserved:
            return frozenset()
        taken = {engine for engine, by in self._reserved.items() if by is not suspicion}
        if suspicion.suspected and len(taken) >= max(1, len(engines) // 2):
            return {*engines, *taken}
        return taken

    async def alone(self, engine: Engine, suspicion: Suspicion) -> bool:
        """Reserves the engine for a suspect, and waits until its other calls are proven. False if
        it failed meanwhile. Otherwise the caller begins an `attempt` now, or calls `give_up`."""
        self._reserved[engine] = suspicion
        try:
            while engine.info.healthy and (wait_s := self._unproven_for_s(engine)) > 0:
                await self.changed(wait_s)
        except BaseException:
            self.give_up(engine, suspicion)
            raise
        if not engine.info.healthy:
            self.give_up(engine, suspicion)
        return engine.info.healthy

    def give_up(self, engine: Engine, suspicion: Suspicion) -> None:
        """Ends the engine's reservation for this suspect, if it has one."""
        self._free(engine, suspicion)

    async def changed(self, timeout_s: float) -> None:
        """Returns when an engine is free again or an incident is settled, or after the time."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        except TimeoutError:
            return

    def _convict(self, suspicion: Suspicion) -> None:
        suspicion.guilty = True
        self._guilty[suspicion.prompt] = asyncio.get_running_loop().time()
        self._guilty.move_to_end(suspicion.prompt)
        if len(self._guilty) > REMEMBERED_PROMPTS:
            self._guilty.popitem(last=False)

    def _is_remembered(self, prompt: bytes) -> bool:
        since = asyncio.get_running_loop().time() - REMEMBERED_S
        while self._guilty and next(iter(self._guilty.values())) <= since:
            self._guilty.popitem(last=False)
        return prompt in self._guilty

    def _unproven_for_s(self, engine: Engine) -> float:
        """How long from now until all calls of the engine are proven, if none gets a token."""
        unproven = [each for each in self.running(engine) if self._is_unproven(each)]
        return max((UNPROVEN_S - self._age_s(each) for each in unproven), default=0.0)

    def _is_unproven(self, attempt: Attempt) -> bool:
        return not attempt.has_tokens and self._age_s(attempt) < UNPROVEN_S

    def _age_s(self, attempt: Attempt) -> float:
        return asyncio.get_running_loop().time() - attempt.begun_at

    def _free(self, engine: Engine, suspicion: Suspicion) -> None:
        if self._reserved.get(engine) is suspicion:
            del self._reserved[engine]
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def _refusal(suspicion: Suspicion) -> RequestError:
    what = "an equal request took down its engines"
    if suspicion.guilty:
        ids = ", ".join(suspicion.lost)
        what = f"this request took down {len(suspicion.lost)} engines (ids {ids})"
    return RequestError(
        f"{what} and is not sent to another one: send a different request; the proxy's log has the"
        " engines' errors",
        code="engines_lost",
    )
