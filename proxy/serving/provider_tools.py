"""Runs the tools that an agent's provider would run: a search of the web, by a backend of the user.

A call of such a tool ends an answer of the model. Its result is the message that follows, and what
the model says then is another answer, in a turn of its own; the agent gets all of them as one.
Invariant: within a session the same query has the same result, which is the recorded one, so that a
retry, a replay and a history without results continue the recorded path. A backend that fails, or
that is not configured, gives the error of the dialect, and the model goes on.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import numpy as np
from msgspec.structs import replace

from proxy.config import ToolsConfig
from proxy.conversation.message_keys import ConversationKey, Key, message_digest
from proxy.conversation.messages import Message, ToolCall, arguments_object, load_answer
from proxy.conversation.recorded import load_request
from proxy.errors import ConfigurationError
from proxy.records import EMPTY_IDS
from proxy.rendering.deltas import ResultDelta
from proxy.serving.asked import Asked, request_key
from proxy.settings.plugins import load_plugin
from proxy.store.protocol import Store
from proxy.wire.dialect import Call, Outcome
from proxy.wire.web_search import (
    NO_QUERY,
    NOT_RECORDED,
    TOO_MANY,
    UNAVAILABLE,
    UNNAMED,
    WEB_SEARCH,
    is_error,
    results_text,
)

Search = Callable[[str, Mapping[str, Any]], Awaitable[Sequence[Mapping[str, str]]]]
"""Gets the query, and the agent's entry of the tool (`allowed_domains`, `user_location`, …)."""
MAX_ANSWERS = 10
"""Answers of one call that may call such a tool; then the agent gets what there is."""
MAX_RESULTS = 20
MAX_TEXT_CHARS = 8000
"""Characters of each field of a result; 20 results are 40,000 tokens at most."""
KEPT_CHARS = 2**18
"""Characters of results that a session keeps in memory; others are read from the record again."""
MAX_TOGETHER = 1000
"""Answers with several searches that a session remembers as such; an older one forks if it comes
back without ids."""

_log = logging.getLogger(__name__)


class SessionSearches:
    """The results that one session has seen, by query, with the arguments that the model wrote, and
    the queries that one answer had together."""

    def __init__(self) -> None:
        self.is_read = False
        """Whether the record was searched, after a start of the proxy."""
        self._found: OrderedDict[str, tuple[str, str]] = OrderedDict()
        self._chars = 0
        self._together: OrderedDict[int, None] = OrderedDict()
        """Hashes of the queries of an answer that has several."""
        self.knows_together = False
        """Whether those of the record are known, too."""

    def get(self, query: str | None) -> tuple[str, str] | None:
        """Arguments and text."""
        return None if query is None else self._found.get(query)

    def keep(self, query: str, arguments: str, text: str) -> None:
        if query in self._found:
            return
        self._found[query] = arguments, text
        self._chars += len(text)
        while self._chars > KEPT_CHARS and len(self._found) > 1:
            self._chars -= len(self._found.popitem(last=False)[1][1])
            self.is_read = False

    def keep_together(self, calls: Sequence[ToolCall]) -> None:
        """Remembers the searches of one answer, `calls`, as such."""
        if len(calls) > 1:
            self._together[hash(_queries(calls))] = None
            while len(self._together) > MAX_TOGETHER:
                self._together.popitem(last=False)

    def together(self, calls: Sequence[ToolCall]) -> int:
        """Number of the first of `calls`, whose answers are not known, that are of one answer."""
        queries = _queries(calls)
        joint = (n for n in range(len(calls), 1, -1) if hash(queries[:n]) in self._together)
        return next(joint, 1)


class ProviderTools:
    """The configured backends."""

    def __init__(self, config: ToolsConfig, store: Store) -> None:
        """Raises ConfigurationError if a backend cannot be loaded."""
        self._store = store
        self._timeout_s = config.timeout_s
        self._search: Search | None = None
        if config.web_search is not None:
            self._search = load_plugin("tools.web_search", config.web_search, {})
            if not inspect.iscoroutinefunction(self._search):
                raise ConfigurationError(
                    f"tools.web_search: {config.web_search} is not a coroutine function; write "
                    "async def search(query, tool)"
                )
        self.offered = frozenset([WEB_SEARCH]) if self._search is not None else frozenset[str]()
        """The tools that models are offered."""

    async def run(
        self, session_id: str, searches: SessionSearches, asked: Asked, said: Outcome, made: int
    ) -> tuple[ResultDelta, ...]:
        """The results of the calls of `said` that the proxy runs. `made` is the number of those
        before, of the same request."""
        tools, results = asked.request.provider_tools, list[ResultDelta]()
        searches.keep_together([call for call in said.message.tool_calls if call.name in tools])
        for call in said.message.tool_calls:
            if call.name in tools:
                most = tools[call.name].get("max_uses")
                is_over = isinstance(most, int) and made + len(results) >= most
                text = TOO_MANY if is_over else await self._run(session_id, searches, call, tools)
                results.append(ResultDelta(call, text))
        return tuple(results)

    async def _run(
        self,
        session_id: str,
        searches: SessionSearches,
        call: ToolCall,
        tools: Mapping[str, Mapping[str, Any]],
    ) -> str:
        if self._search is None:
            return UNAVAILABLE
        query = _query(call)
        if not query:
            return NO_QUERY
        known = await self._known(session_id, searches, query)
        if known is not None:
            return known[1]
        try:
            async with asyncio.timeout(self._timeout_s):
                text = results_text(_checked(await self._search(query, tools[call.name])))
        except Exception as error:  # noqa: BLE001 - a backend is the user's; the model gets an error
            _log.warning("tools.web_search failed: %s: %s", type(error).__name__, error)
            return UNAVAILABLE
        searches.keep(query, call.arguments, text)
        return text

    async def fill(self, session_id: str, searches: SessionSearches, request: Call) -> None:
        """Puts recorded results into a history that has none, and makes one message of the searches
        of one answer where their items have no ids."""
        for message, call in request.searched:
            if not message.text:
                known = await self._known(session_id, searches, _query(call))
                message.text = NOT_RECORDED if known is None else known[1]
                if known is not None:
                    call.arguments = known[0]
        if sum(call.id.startswith(UNNAMED) for _, call in request.searched) > 1:
            if not searches.knows_together:
                await self._read(session_id, searches)
            conversation = request.conversation
            conversation.messages = _with_joint_searches(conversation.messages, searches)

    async def _known(
        self, session_id: str, searches: SessionSearches, query: str | None
    ) -> tuple[str, str] | None:
        found = searches.get(query)
        if found is None and not searches.is_read:
            await self._read(session_id, searches)
        return searches.get(query)

    async def _read(self, session_id: str, searches: SessionSearches) -> None:
        """Reads the record's searches, after a start of the proxy."""
        searches.is_read = searches.knows_together = True
        calls: dict[str, ToolCall] = {}
        for turn in await self._store.get_turns(session_id):
            request = load_request(turn)
            for message in request.messages if request is not None else ():
                call = calls.get(message.tool_call_id or "")
                if call is not None and message.role == "tool" and not is_error(message.text):
                    searches.keep(_query(call) or "", call.arguments, message.text)
            if turn.answer:
                made = [c for c in load_answer(turn.answer).tool_calls if c.name == WEB_SEARCH]
                searches.keep_together(made)
                calls.update((call.id, call) for call in made)


def _with_joint_searches(messages: list[Message], searches: SessionSearches) -> list[Message]:
    """`call, result, call, result` of one answer as `calls, results`, for calls without ids."""
    out, at = list[Message](), 0
    while at < len(messages):
        ends = at
        while _is_unnamed_search(messages, ends, alone=ends > at):
            ends += 2
        calls = [messages[n].tool_calls[-1] for n in range(at, ends, 2)]
        joint = searches.together(calls)
        if joint > 1:
            first, more = messages[at], calls[1:joint]
            out.append(replace(first, tool_calls=[*first.tool_calls, *more]))
            out += messages[at + 1 : at + 2 * joint : 2]
            at += 2 * joint
        else:
            out.append(messages[at])
            at += 1
    return out


def _is_unnamed_search(messages: Sequence[Message], at: int, *, alone: bool) -> bool:
    """Whether a search without an id, and its result, are there; `alone`: and nothing else."""
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
        prompt_ids=before[0].prompt_ids,
        sampled_ids=np.concatenate(ids) if ids else None,
    )


def _query(call: ToolCall) -> str | None:
    query = arguments_object(call).get("query")
    return query if isinstance(query, str) else None


def _queries(calls: Sequence[ToolCall]) -> tuple[str, ...]:
    return tuple(_query(call) or "" for call in calls)


def _checked(results: Any) -> list[dict[str, str]]:
    """Raises TypeError for what is not a list of results."""
    found = []
    for each in list(results)[:MAX_RESULTS]:
        fields = {name: each.get(name, "") for name in ("title", "url", "text")}
        if not all(isinstance(value, str) for value in fields.values()):
            raise TypeError(f"title, url and text of a result must be strings, got {fields}")
        found.append({name: value[:MAX_TEXT_CHARS] for name, value in fields.items()})
    return found
