"""Runs the tools that an agent's provider would run, by backends of the user: a search of the web,
and code.

A call of such a tool ends an answer of the model. Its result is the message that follows, and what
the model says then is another answer, in a turn of its own; the agent gets all of them as one.
Invariant: a recorded result is the result of its call for ever, so that a retry, a replay and a
history without results continue the recorded path; a search has the result of the session's first
one for the same query. A backend that fails, or that is not configured, gives the error of the
dialect, and the model goes on.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from msgspec.structs import replace

from proxy.config import ToolsConfig
from proxy.conversation.message_keys import ConversationKey, Key, message_digest
from proxy.conversation.messages import Message, ToolCall, load_answer
from proxy.conversation.recorded import load_request
from proxy.errors import ConfigurationError
from proxy.records import EMPTY_IDS
from proxy.rendering.deltas import ResultDelta
from proxy.serving.asked import Asked, request_key
from proxy.settings.plugins import load_plugin
from proxy.store.protocol import Store
from proxy.wire import code_execution as code
from proxy.wire import web_search as web
from proxy.wire.dialect import Call, Outcome
from proxy.wire.provided import RESULT_BLOCKS, UNNAMED, PastCall, input_of

Search = Callable[[str, Mapping[str, Any]], Awaitable[Sequence[Mapping[str, str]]]]
"""Gets the query, and the agent's entry of the tool (`allowed_domains`, `user_location`, …)."""
Run = Callable[[code.Execution, Mapping[str, Any]], Awaitable[Mapping[str, Any]]]
"""Gets the code, and the agent's entry of the tool; returns `stdout`, `stderr`, `return_code`."""
SEARCH_TIMEOUT_S = 30.0
CODE_TIMEOUT_S = 300.0
"""Then the model gets an error. A backend that wants it sooner raises TimeoutError."""
MAX_ANSWERS = 10
"""Answers of one call that may call such a tool; then the agent gets what there is."""
MAX_RESULTS = 20
MAX_TEXT_CHARS = 8000
"""Characters of each field of a search's result; 20 results are 40,000 tokens at most."""
KEPT_CHARS = 2**18
"""Characters of results that a session keeps in memory; others are read from the record again."""
MAX_TOGETHER = 1000
"""Answers with several calls that a session remembers as such; an older one forks if it comes
back without ids."""
NAMES = frozenset(RESULT_BLOCKS.values())
"""The functions that the proxy runs."""

_log = logging.getLogger(__name__)


class Ran(NamedTuple):
    """A call that the proxy has run."""

    turn: int
    """The turn that made the call."""
    call: ToolCall
    text: str
    """Its result."""

    @property
    def key(self) -> tuple[int, str]:
        """A search is known by its query, code by the call."""
        is_search = self.call.name == web.WEB_SEARCH
        return (-1, input_of(self.call)) if is_search else (self.turn, self.call.id)


class SessionResults:
    """The latest results of one session, and the inputs that one answer had together."""

    def __init__(self) -> None:
        self.is_whole = False
        """Whether all of the record's results are in memory."""
        self._ran: OrderedDict[tuple[int, str], Ran] = OrderedDict()
        self._chars = 0
        self._together: OrderedDict[int, None] = OrderedDict()
        """Hashes of the inputs of an answer that has several calls."""
        self.knows_together = False
        """Whether those of the record are known, too."""

    def all(self) -> list[Ran]:
        """Those in memory, in order."""
        return sorted(self._ran.values(), key=lambda ran: ran.turn)

    def keep(self, ran: Ran) -> None:
        if ran.key in self._ran:
            return
        self._ran[ran.key] = ran
        self._chars += len(ran.text)
        while self._chars > KEPT_CHARS and len(self._ran) > 1:
            self._chars -= len(self._ran.popitem(last=False)[1].text)
            self.is_whole = False

    def keep_together(self, calls: Sequence[ToolCall]) -> None:
        """Remembers the calls of one answer, `calls`, as such."""
        if len(calls) > 1:
            self._together[hash(_inputs(calls))] = None
            while len(self._together) > MAX_TOGETHER:
                self._together.popitem(last=False)

    def together(self, calls: Sequence[ToolCall]) -> int:
        """Number of the first of `calls`, whose answers are not known, that are of one answer."""
        inputs = _inputs(calls)
        joint = (n for n in range(len(calls), 1, -1) if hash(inputs[:n]) in self._together)
        return next(joint, 1)


class ProviderTools:
    """The configured backends."""

    def __init__(self, config: ToolsConfig, store: Store) -> None:
        """Raises ConfigurationError if a backend cannot be loaded."""
        self._store = store
        self._search: Search | None = _loaded("web_search", config.web_search, "query, tool")
        self._run_code: Run | None = _loaded("code_execution", config.code_execution, "code, tool")
        loaded = {web.WEB_SEARCH: self._search, code.CODE: self._run_code}
        self.offered = frozenset(name for name, backend in loaded.items() if backend is not None)
        """The tools that models are offered."""

    async def run(
        self,
        session_id: str,
        seen: SessionResults,
        asked: Asked,
        said: Outcome,
        made: int,
        *,
        replayed: bool,
    ) -> tuple[ResultDelta, ...]:
        """The results of the calls of `said` that the proxy runs. `made` is the number of those
        before, of the same request; `replayed`: whether `said` was recorded before."""
        tools, results = asked.request.provider_tools, list[ResultDelta]()
        seen.keep_together([call for call in said.message.tool_calls if call.name in tools])
        for call in said.message.tool_calls:
            if call.name not in tools:
                continue
            most, is_search = tools[call.name].get("max_uses"), call.name == web.WEB_SEARCH
            ran, known = Ran(said.turn, call, ""), None
            if is_search or replayed:
                known = await self._known(session_id, seen, ran.key)
            if isinstance(most, int) and made + len(results) >= most:
                text = web.TOO_MANY if is_search else code.TOO_MANY
            elif known is not None:
                text = known.text
            elif is_search:
                text = await self._found(call, tools[call.name])
            else:
                name = f"{said.turn}_{call.id}"
                text = await self._executed(session_id, name, call, tools[call.name])
            if not web.is_error(text):
                seen.keep(ran._replace(text=text))
            results.append(ResultDelta(call, text))
        return tuple(results)

    async def _found(self, call: ToolCall, tool: Mapping[str, Any]) -> str:
        """The result of a search."""
        query = input_of(call)
        if self._search is None or not query:
            return web.UNAVAILABLE if self._search is None else web.NO_QUERY
        try:
            async with asyncio.timeout(SEARCH_TIMEOUT_S):
                return web.results_text(_checked(await self._search(query, tool)))
        except Exception as error:  # noqa: BLE001 - a backend is the user's; the model gets an error
            _log.warning("tools.web_search failed: %s: %s", type(error).__name__, error)
            return web.UNAVAILABLE

    async def _executed(
        self, session_id: str, name: str, call: ToolCall, tool: Mapping[str, Any]
    ) -> str:
        """The result of code."""
        source = code.code_of(call)
        if self._run_code is None or not source:
            return code.UNAVAILABLE if self._run_code is None else code.NO_CODE
        execution = code.Execution(code.LANGUAGES[call.name], source, session_id, name)
        try:
            async with asyncio.timeout(CODE_TIMEOUT_S):
                return code.executed_text(await self._run_code(execution, tool))
        except TimeoutError:
            return code.TIMED_OUT
        except Exception as error:  # noqa: BLE001 - a backend is the user's; the model gets an error
            _log.warning("tools.code_execution failed: %s: %s", type(error).__name__, error)
            return code.UNAVAILABLE

    async def fill(self, session_id: str, seen: SessionResults, request: Call) -> None:
        """Puts recorded results into a history that has none, and makes one message of the calls
        of one answer where their items have no ids."""
        lacking = [past for past in request.past_calls if not past.result.text]
        if lacking:
            found = _matched(lacking, seen.all()) if seen.is_whole else [None]
            if None in found:
                found = _matched(lacking, await self._read(session_id, seen))
            for past, ran in zip(lacking, found, strict=True):
                past.result.text = past.text_if_lost() if ran is None else ran.text
                if ran is not None:
                    past.call.arguments = ran.call.arguments
        if sum(past.call.id.startswith(UNNAMED) for past in request.past_calls) > 1:
            if not seen.knows_together:
                await self._read(session_id, seen)
            conversation = request.conversation
            conversation.messages = _with_joint_calls(conversation.messages, seen)

    async def _known(
        self, session_id: str, seen: SessionResults, key: tuple[int, str]
    ) -> Ran | None:
        """A result that is in memory, or in the record."""
        known = next((ran for ran in seen.all() if ran.key == key), None)
        if known is None and not seen.is_whole:
            ran = await self._read(session_id, seen)
            known = next((each for each in ran if each.key == key), None)
        return known

    async def _read(self, session_id: str, seen: SessionResults) -> list[Ran]:
        """All results of the record and of the memory, in order; the memory keeps the last ones."""
        found: dict[tuple[int, str], Ran] = {}
        for ran in [*await self._recorded(session_id, seen), *seen.all()]:
            found.setdefault(ran.key, ran)
        every = list(found.values())
        seen.is_whole = seen.knows_together = True
        for ran in every:
            seen.keep(ran)
        return every

    async def _recorded(self, session_id: str, seen: SessionResults) -> list[Ran]:
        calls: dict[tuple[int | None, str], tuple[int, ToolCall]] = {}
        found = list[Ran]()
        for turn in await self._store.get_turns(session_id):
            request = load_request(turn)
            after, messages = (request.after, request.messages) if request else (None, [])
            for message in messages:
                made = calls.get((after, message.tool_call_id or ""))
                if made is not None and message.role == "tool" and not web.is_error(message.text):
                    found.append(Ran(*made, message.text))
            if turn.answer:
                called = [c for c in load_answer(turn.answer).tool_calls if c.name in NAMES]
                seen.keep_together(called)
                calls.update(((turn.index, call.id), (turn.index, call)) for call in called)
        return found


def _loaded(name: str, path: str | None, parameters: str) -> Any:
    """The backend of the setting `tools.NAME`. Raises ConfigurationError."""
    if path is None:
        return None
    backend = load_plugin(f"tools.{name}", path, {})
    if not inspect.iscoroutinefunction(backend):
        raise ConfigurationError(
            f"tools.{name}: {path} is not a coroutine function; write async def run({parameters})"
        )
    return backend


def _matched(lacking: Sequence[PastCall], ran: Sequence[Ran]) -> list[Ran | None]:
    """The recorded call of each item. Code without an id of ours that was run several times, with
    what looks like the same result, is matched in order."""
    known, found = {each.key: each for each in ran}, list[Ran | None]()
    nth = Counter[int]()
    for past in lacking:
        item = past.item
        if item is None:
            found.append(known.get((-1, input_of(past.call))))
        elif item.turn is not None:
            found.append(known.get((item.turn, past.call.id)))
        else:
            alike = [n for n, each in enumerate(ran) if item.is_of(each.call, each.text)]
            place = alike[min(nth[alike[0]], len(alike) - 1)] if alike else None
            nth.update(alike[:1])
            found.append(None if place is None else ran[place])
    return found


def _with_joint_calls(messages: list[Message], seen: SessionResults) -> list[Message]:
    """`call, result, call, result` of one answer as `calls, results`, for calls without ids."""
    out, at = list[Message](), 0
    while at < len(messages):
        ends = at
        while _is_unnamed_call(messages, ends, alone=ends > at):
            ends += 2
        calls = [messages[n].tool_calls[-1] for n in range(at, ends, 2)]
        joint = seen.together(calls)
        if joint > 1:
            first, more = messages[at], calls[1:joint]
            out.append(replace(first, tool_calls=[*first.tool_calls, *more]))
            out += messages[at + 1 : at + 2 * joint : 2]
            at += 2 * joint
        else:
            out.append(messages[at])
            at += 1
    return out


def _is_unnamed_call(messages: Sequence[Message], at: int, *, alone: bool) -> bool:
    """Whether a call without an id, and its result, are there; `alone`: and nothing else."""
    if at + 1 >= len(messages) or not messages[at].tool_calls:
        return False
    message, call = messages[at], messages[at].tool_calls[-1]
    if alone and (message.text or message.reasoning or len(message.tool_calls) > 1):
        return False
    return call.id.startswith(UNNAMED) and messages[at + 1].tool_call_id == call.id


def next_request(asked: Asked, said: Outcome, answered: ConversationKey) -> Asked:
    """The request for what follows the results of `said`, whose answer's key is `answered`."""
    request, options = asked.request, asked.request.options
    results = [Message("tool", result.text, tool_call_id=result.call.id) for result in said.results]
    calls = [call.id for call in said.message.tool_calls]
    keys: list[Key] = [*asked.keys, answered]
    for digest in [message_digest(message, calls) for message in results]:
        answered = answered.then(digest)
        keys.append(answered)
    left = options.max_tokens and max(1, options.max_tokens - said.completion_tokens)
    messages = [*request.conversation.messages, said.message, *results]
    request = replace(
        request,
        conversation=replace(request.conversation, messages=messages, prefill=None),
        options=replace(options, forced=None, max_tokens=left),
    )
    key = request_key(answered, request, asked.policy)
    return replace(asked, request=request, keys=keys, request_key=key, opening=EMPTY_IDS, tidied=())


def joined(before: Sequence[Outcome], last: Outcome) -> Outcome:
    """All answers of a call as one; `before` has at least one."""
    parts = [*before, last]
    ids = [part.sampled_ids for part in parts if part.sampled_ids is not None]
    return replace(
        last,
        before=tuple(before),
        prompt_tokens=before[0].prompt_tokens,
        cached_tokens=before[0].cached_tokens,
        completion_tokens=sum(part.completion_tokens for part in parts),
        reasoning_tokens=sum(part.reasoning_tokens for part in parts),
        prompt_ids=before[0].prompt_ids,
        sampled_ids=np.concatenate(ids) if ids else None,
    )


def _inputs(calls: Iterable[ToolCall]) -> tuple[tuple[str, str], ...]:
    return tuple((call.name, input_of(call)) for call in calls)


def _checked(results: Any) -> list[dict[str, str]]:
    """Raises TypeError for what is not a list of results."""
    found = []
    for each in list(results)[:MAX_RESULTS]:
        fields = {name: each.get(name, "") for name in ("title", "url", "text")}
        if not all(isinstance(value, str) for value in fields.values()):
            raise TypeError(f"title, url and text of a result must be strings, got {fields}")
        found.append({name: value[:MAX_TEXT_CHARS] for name, value in fields.items()})
    return found
