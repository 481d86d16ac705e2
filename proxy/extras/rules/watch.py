"""Matches search rules with each recorded turn, and marks its session.

A call hands over its turn (`recorded`) and goes on; one task matches the waiting turns in a thread.
`settled` returns when all turns of a session are matched, also those that another process or an
earlier one recorded; `complete` waits for it, so that the marks of a completed session are all
there. Invariant: no call waits for a rule or fails by one; matching a rule with a turn takes at
most `RULE_S`. A rule that takes longer is given up for this turn, and counted. If the store fails,
turns are matched again later. Any other error is a fault of one rule or one turn: it is logged,
counted and kept in `faults`, this turn is not matched again, and all others are.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Sequence

from pydantic import with_config
from typing_extensions import TypedDict

from proxy.errors import RequestError, SessionError, StoreError
from proxy.extras.rules.rules import ActiveRule, RuleConfig, saved_rules
from proxy.http.valid_json import CLOSED, valid_text
from proxy.machine.secrecy import without_credentials
from proxy.metrics import Metrics
from proxy.records import Mark, RuleAction, Turn, TurnStatus
from proxy.search.terms import MatchingTime
from proxy.store.browser import WrittenTurn
from proxy.store.protocol import Store

RULE_S = 0.5
"""Seconds of matching a rule with a turn."""
READ_S = 2.0
"""Seconds after which the saved rules are read again, if there is a turn to match."""
WAITING_BYTES = 64 * 2**20
"""Text of turns that wait to be matched. Beyond it only their indexes are kept, and the turns are
read from the store again."""
KNOWN_SESSIONS = 1000
RETRY_S = 1.0
KEPT_FAULTS = 20
FAULT_CHARS = 300
_log = logging.getLogger(__name__)
Act = Callable[[str, Mark], Awaitable[None]]


@with_config(CLOSED)
class RuleFault(TypedDict):
    """An error while a rule was matched, for the page."""

    rule: str
    """Empty if it is not one rule's."""
    session: str
    turn: int
    """-1 if it is not one turn's."""
    at: float
    error: str


class RuleWatch:
    """The rules of one proxy process. `start` begins to match, `close` ends it."""

    def __init__(
        self, store: Store, configured: Sequence[RuleConfig], metrics: Metrics, act: Act
    ) -> None:
        """`act` is called with each match of a rule that does more than mark. It may be called
        again for the same match, and returns if there is nothing to do."""
        self._store = store
        self._configured = [ActiveRule.of(rule) for rule in configured]
        self._act = act
        self._hits = metrics.counter("rule_hits", "Sessions that a search rule has marked", "rule")
        self._given_up = metrics.counter(
            "rules_given_up",
            "Turns for which matching a search rule took too long, so that it was given up",
            "rule",
        )
        self._errors = metrics.counter(
            "rule_errors",
            "Errors while search rules were matched, by rule; empty: not those of one rule",
            "rule",
        )
        self._rules = self._configured
        self._read_at = -READ_S
        self._waiting: OrderedDict[str, dict[int, Turn | None]] = OrderedDict()
        """By session and index; None: to be read from the store."""
        self._bytes = 0
        self._matched: OrderedDict[str, set[int]] = OrderedDict()
        """Turns of open sessions that are matched already."""
        self._arrived = asyncio.Event()
        self._matching = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None
        self._faults: deque[RuleFault] = deque(maxlen=KEPT_FAULTS)

    @property
    def faults(self) -> list[RuleFault]:
        """The last errors that were not the store's, the oldest first."""
        return list(self._faults)

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())
        self._task.add_done_callback(_ended)

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    def recorded(self, session_id: str, turn: Turn) -> None:
        """Takes a turn that is recorded; `session_id` is the session that made the call."""
        if not self._rules and not self._matching.locked() and self._knows_rules:
            return
        kept = turn if self._bytes + _bytes_of(turn) <= WAITING_BYTES else None
        self._bytes += _bytes_of(kept)
        self._waiting.setdefault(session_id, {})[turn.index] = kept
        self._arrived.set()

    async def settled(self, session_id: str) -> None:
        """Returns when all recorded turns of the session are matched.

        Raises:
            StoreError: the store failed, so that a mark may be missing.
        """
        async with self._matching:
            await self._read_rules()
            if self._rules:
                known = self._matched.get(session_id, set())
                waiting = self._waiting.setdefault(session_id, {})
                for turn in await self._turns(session_id):
                    known_or_waiting = turn.index in known or turn.index in waiting
                    if not known_or_waiting and turn.status is not TurnStatus.OPEN:
                        waiting[turn.index] = turn
                        self._bytes += _bytes_of(turn)
            await self._match(session_id)
            self._matched.pop(session_id, None)

    async def _run(self) -> None:
        while True:
            await self._arrived.wait()
            while self._waiting:
                try:
                    async with self._matching:
                        await self._read_rules()
                        if self._waiting:
                            await self._match(next(iter(self._waiting)))
                except StoreError as error:
                    _log.warning("search rules: %s; trying again", error.message)
                    await asyncio.sleep(RETRY_S)
            self._arrived.clear()

    @property
    def _knows_rules(self) -> bool:
        """Whether the rules were read within READ_S."""
        return time.monotonic() - self._read_at < READ_S

    async def _read_rules(self) -> None:
        if self._knows_rules:
            return
        self._read_at = time.monotonic()
        configured = {rule.name for rule in self._configured}
        try:
            saved = await saved_rules(self._store.browser)
            active = [ActiveRule.of(rule) for rule in saved if rule.name not in configured]
        except StoreError:
            self._read_at -= READ_S
            raise
        except Exception as error:  # noqa: BLE001 (the rules that are known go on)
            self._failed("", "", -1, error)
        else:
            self._rules = self._configured + active

    async def _match(self, session_id: str) -> None:
        """Matches the waiting turns of a session. If it fails at one, this one and the later ones
        go on waiting, behind those of other sessions."""
        waiting = self._waiting.get(session_id, {})
        try:
            for index in sorted(waiting):
                if self._rules:
                    await self._match_turn(session_id, index, waiting[index])
                    self._remember(session_id, index)
                self._bytes -= _bytes_of(waiting.pop(index))
        finally:
            if waiting:
                self._waiting.move_to_end(session_id)
                self._arrived.set()
            else:
                self._waiting.pop(session_id, None)
        if not self._waiting:
            self._bytes = 0

    async def _match_turn(self, session_id: str, index: int, turn: Turn | None) -> None:
        """`turn`: None if it is to be read from the store."""
        if turn is None:
            turn = next(iter(await self._turns(session_id, index, index + 1)), None)
        if turn is not None:
            await self._mark(session_id, turn)

    async def _turns(self, session_id: str, start: int = 0, stop: int | None = None) -> list[Turn]:
        """Turns of the session; none if they cannot be read for another reason than the store."""
        try:
            return await self._store.get_turns(session_id, start, stop)
        except StoreError:
            raise
        except Exception as error:  # noqa: BLE001 (the turns of other sessions are matched)
            self._failed("", session_id, -1 if stop is None else start, error)
            return []

    async def _mark(self, session_id: str, turn: Turn) -> None:
        """Errors that are not the store's are reported last, so that those of a turn which is
        matched again because the store failed are reported once."""
        found, given_up, failed = await asyncio.to_thread(_found, self._rules, turn)
        for rule, text in found:
            try:
                await self._apply(rule, session_id, turn.index, text)
            except StoreError:
                raise
            except SessionError:
                return  # it was removed meanwhile
            except Exception as error:  # noqa: BLE001 (the other rules are applied)
                failed.append((rule, error))
        for rule, fault in failed:
            self._failed(rule.name, session_id, turn.index, fault)
        for rule in given_up:
            _log.warning(
                "search rule %s took longer than %g s for turn %d of session %s and was given up",
                *(rule.name, RULE_S, turn.index, session_id),
            )
            self._given_up.labels(rule.name).inc()

    async def _apply(self, rule: ActiveRule, session_id: str, turn: int, text: str) -> None:
        mark = Mark(rule.name, rule.action, turn, time.time(), text)
        if await self._store.browser.add_mark(session_id, mark):
            self._hits.labels(rule.name).inc()
            event = {"rule": mark.rule, "action": mark.action, "turn": mark.turn}
            await self._store.add_event(session_id, "marked", event | {"found": mark.found})
        if rule.action is not RuleAction.MARK:
            await self._act(session_id, mark)

    def _failed(self, rule: str, session_id: str, turn: int, error: Exception) -> None:
        """Reports an error that is not the store's."""
        _log.error(
            "search rule %s failed at turn %d of session %s; the other rules and turns are matched",
            *(rule or "(any)", turn, session_id),
            exc_info=error,
        )
        self._errors.labels(rule).inc()
        said = valid_text(without_credentials(f"{type(error).__name__}: {error}"))[:FAULT_CHARS]
        self._faults.append(
            {"rule": rule, "session": session_id, "turn": turn, "at": time.time(), "error": said}
        )

    def _remember(self, session_id: str, index: int) -> None:
        self._matched.setdefault(session_id, set()).add(index)
        self._matched.move_to_end(session_id)
        while len(self._matched) > KNOWN_SESSIONS:
            self._matched.popitem(last=False)


def _bytes_of(turn: Turn | None) -> int:
    return 0 if turn is None else len(turn.request) + len(turn.answer)


def _ended(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.critical("search rules are no longer matched; restart the proxy", exc_info=error)


def _found(
    rules: Sequence[ActiveRule], turn: Turn
) -> tuple[list[tuple[ActiveRule, str]], list[ActiveRule], list[tuple[ActiveRule, Exception]]]:
    """The rules that a turn matches, each with the text; those that took too long; and those that
    failed."""
    written = WrittenTurn(
        place=0,
        session_id=turn.session_id,
        index=turn.index,
        fork_cause=turn.fork_cause,
        agent_id=turn.agent_id,
        started_at=turn.started_at,
        request=turn.request,
        answer=turn.answer,
    )
    found, given_up, failed = [], [], []
    for rule in rules:
        try:
            matches = rule.terms.matches(written, MatchingTime(RULE_S))
        except RequestError:
            given_up.append(rule)
        except Exception as error:  # noqa: BLE001 (the other rules are matched)
            failed.append((rule, error))
        else:
            if matches is not None:
                found.append((rule, _storable(matches[0]["match"]) if matches else ""))
    return found, given_up, failed


def _storable(text: str) -> str:
    """PostgreSQL stores neither NUL nor lone surrogates."""
    return valid_text(text.replace("\0", "\ufffd"))
