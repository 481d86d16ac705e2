"""Turns a request into a call: identifies and admits it, then joins a running call or starts one.

The keys of a request identify it, after the calls in its history that the agent's client tidied
are the recorded ones again. The limits of the session admit it.

Invariant: nothing here writes to the store. Only a call's own task (`call`) does, so that a request
that is cancelled while it waits here leaves nothing behind.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from proxy.branching.prefix import Recognised
from proxy.config import SessionsConfig
from proxy.conversation.message_keys import (
    Key,
    RawKey,
    continued,
    key_from_stored,
    raw_key,
)
from proxy.conversation.messages import Conversation, load_answer
from proxy.conversation.references import ReferringConversation
from proxy.errors import EngineError, RequestError
from proxy.records import EMPTY_IDS, Ids
from proxy.serving.asked import Asked, Caller, request_key, required_tool
from proxy.serving.backend import Backend
from proxy.serving.call import LiveCall
from proxy.serving.forced_call import call_or_answer
from proxy.serving.prompt_bounds import refuse_too_many_chars
from proxy.serving.retries import joins
from proxy.serving.returned_calls import Recovered
from proxy.serving.sessions import LiveSession
from proxy.wire.body import NOTED_CHARS, scrub
from proxy.wire.dialect import Call
from proxy.wire.fields import Note
from proxy.wire.images import SentImages

MAX_PREFILL_CHARS = 500_000
"""Characters of an answer that the request begins: more than an answer of 100,000 tokens has."""
THREADED_PREFILL_CHARS = 5000
"""A longer one is tokenised outside the event loop: 5,000 characters take a few ms."""


class IncomingCalls:
    """The calls of this process."""

    def __init__(self, backend: Backend, limits: SessionsConfig) -> None:
        """`limits` apply to sessions that do not set their own."""
        self._backend = backend
        self._running: set[LiveCall] = set()
        self._latest: dict[tuple[str, Key], LiveCall] = {}
        """Session and request key → the latest running call, which a retry joins."""
        self._limits = limits.model_dump(
            include={"max_turns", "max_tokens", "max_concurrent_calls"}
        )

    @property
    def backends(self) -> frozenset[str]:
        """The tools of a provider that the proxy runs."""
        return self._backend.provider_tools.offered

    def new_images(self, live: LiveSession) -> SentImages | None:
        """Takes the images of a request; None: they are shown as texts."""
        return self._backend.images.new(live)

    async def open(self, live: LiveSession, request: Call, caller: Caller) -> LiveCall:
        """Returns the running call that answers the request. The caller must watch it at once.

        Raises RequestError, SessionError, HeldElsewhere or StoreError if no call was started.
        """
        begun = request.options.forced is not None or request.conversation.prefill is not None
        opening = await self._opened(request) if begun else EMPTY_IDS
        if not live.up_to_date:
            async with live.placing:
                await self._backend.ownership.settle(live)
        if request.referring is not None:
            await self._resolve(live, request, request.referring)
        if request.conversation.continues is not None:
            named = await self._answered(live, request.conversation.continues)
            request.conversation.continues = named
        if request.past_calls:
            tools, session_id = self._backend.provider_tools, live.session.session_id
            await tools.fill(session_id, live.results, request)
        if request.images is not None:
            await self._learn_images(live, request, request.images)
        if request.conversation.tools and not self._backend.rendering.shows_tools:
            request.notes.append(_not_shown(request.conversation.tools))
        conversation, large = request.conversation, request.is_large
        tidied = live.returned.recover(conversation)
        recognised = await self._recognised(live, conversation, large=large)
        keys = await self._keys(live, request)
        if found := await self._compare_calls(live, conversation, keys):
            tidied += found
            recognised = await self._recognised(live, conversation, large=large)
            keys = await self._keys(live, request)
        policy = live.session.policy_of(request.model)
        key = request_key(keys[-1], request, policy)
        asked = Asked(request, caller, keys, key, opening, policy, tuple(tidied), recognised)
        running = self._joinable(live, asked)
        if running is not None:
            return running
        if live.branch is None or not live.branch.replays(live.tree, live.retries, asked):
            try:
                self._admit(live, request)
            except RequestError:
                if not await self._is_given_again(live, asked):
                    raise
        call = LiveCall(self._backend, live, asked, self._ended)
        self._running.add(call)
        self._latest[live.session.session_id, key] = call
        call.start()
        return call

    def _joinable(self, live: LiveSession, asked: Asked) -> LiveCall | None:
        """The running call that the request joins."""
        running = self._latest_of(live, asked)
        if running is None or running.abandoned:
            return None
        return running if joins(asked, running.asked, is_awaited=running.is_awaited) else None

    def _latest_of(self, live: LiveSession, asked: Asked) -> LiveCall | None:
        """The latest running call of an equal request."""
        call = self._latest.get((live.session.session_id, asked.request_key))
        return call if call is not None and call.live is live else None

    def _ended(self, call: LiveCall) -> None:
        self._running.discard(call)
        key = call.live.session.session_id, call.asked.request_key
        if self._latest.get(key) is call:
            del self._latest[key]

    async def _learn_images(self, live: LiveSession, request: Call, sent: SentImages) -> None:
        """Raises EngineError."""
        request.notes += await self._backend.images.learn(request.conversation, sent, live)

    async def count_tokens(self, live: LiveSession, request: Call) -> int:
        """Number of tokens of a prompt, with the recorded path that a call would extend. Raises
        RequestError and EngineError."""
        if request.images is not None:
            await self._learn_images(live, request, request.images)
        conversation = request.conversation
        await self._recognised(live, conversation, large=True)
        live.returned.recover(conversation)
        rendering, prefill = self._backend.rendering, conversation.prefill
        keys: list[Key] = []
        if conversation.messages:
            make_keys = partial(live.known_keys.keys, with_reasoning=live.tree.follows)
            keys = [*await asyncio.to_thread(make_keys, conversation)]
            if await self._compare_calls(live, conversation, keys):
                keys = [*await asyncio.to_thread(make_keys, conversation)]
        refuse_too_many_chars(conversation, 0, self._backend.room)
        if keys:
            async with live.placing:
                placed = await asyncio.to_thread(live.tree.place, conversation, keys, rendering)
            ids = placed.prompt
        else:
            ids = await asyncio.to_thread(rendering.full, conversation)
        if prefill is None:
            return len(ids)
        return len(ids) + len(await asyncio.to_thread(rendering.prefill, prefill))

    async def close(self, grace_s: float) -> None:
        """Lets running calls end for `grace_s`, then aborts them. Returns when all have ended."""
        calls = list(self._running)
        if not calls:
            return
        waits = [asyncio.ensure_future(call.wait()) for call in calls]
        await asyncio.wait(waits, timeout=grace_s)
        for call in calls:
            call.abort(EngineError("the proxy is stopping; try again"))
        await asyncio.gather(*waits)

    async def _keys(self, live: LiveSession, request: Call) -> list[Key]:
        """One key per message; the last one is the key of the whole conversation."""
        conversation = request.conversation
        if conversation.raw is not None:
            return [raw_key(conversation.raw)]
        if conversation.continues is not None:
            return await self._continued(live, conversation, conversation.continues)
        make_keys = partial(live.known_keys.keys, conversation, with_reasoning=live.tree.follows)
        return [*(await asyncio.to_thread(make_keys) if request.is_large else make_keys())]

    async def _recognised(
        self, live: LiveSession, conversation: Conversation, *, large: bool
    ) -> Recognised | None:
        """See `LiveBranch.recognise`; None if the session is not a branch."""
        if live.branch is None:
            return None
        recognise = live.branch.recognise
        return (
            await asyncio.to_thread(recognise, conversation) if large else recognise(conversation)
        )

    async def _compare_calls(
        self, live: LiveSession, conversation: Conversation, keys: list[Key]
    ) -> list[Recovered]:
        """Replaces the calls of the history that the agent's client has tidied and that were not
        compared with the recorded ones before. Returns them."""
        if conversation.raw is not None or conversation.continues is not None:
            return []
        if not live.tree.has_calls:
            return []
        since = live.tree.match(keys).answered + 1
        found = [
            (call, turns)
            for call in live.returned.unknown(conversation.messages[since:])
            if (turns := live.tree.turns_of_call(call.id))
        ]
        if not found:
            return []
        wanted = sorted({index for _, turns in found for index in turns})
        session_id = live.session.session_id
        recorded = await self._backend.store.get_turns(
            session_id, since=wanted[0], until=wanted[-1] + 1
        )
        answers = {t.index: load_answer(t.answer).tool_calls for t in recorded if t.answer}
        tidied = []
        for call, turns in found:
            same = [(i, each) for i in turns for each in answers.get(i, []) if each.id == call.id]
            tools = conversation.callable_tools
            tidied.append(live.returned.compare(call, same, tools, live.profile))
        return [each for each in tidied if each is not None]

    async def _resolve(
        self, live: LiveSession, request: Call, referring: ReferringConversation
    ) -> None:
        """Resolves references. Raises RequestError (404) for one that is not in the record."""
        if not all(live.tree.answered(index) for index in referring.turns):
            async with live.placing:
                await self._backend.ownership.reload(live)
        session_id = live.session.session_id
        turns = await self._backend.store.get_turns(session_id, since=min(referring.turns))
        referring.resolve({turn.index: load_answer(turn.answer) for turn in turns if turn.answer})
        request.notes += scrub(referring.conversation, live.profile)

    async def _answered(self, live: LiveSession, index: int) -> int:
        """The turn that `previous_response_id` continues, if it names turn `index`. The beginning
        of a stream has the id of the turn before a required call. Raises RequestError (404)."""
        if not live.tree.answered(index):  # another process may have recorded it
            async with live.placing:
                await self._backend.ownership.reload(live)
        if not live.tree.answered(index):
            raise RequestError(
                f"previous_response_id: turn {index} of this session has no answer",
                param="previous_response_id",
                status=404,
            )
        return call_or_answer(index, live.tree)

    async def _continued(
        self, live: LiveSession, conversation: Conversation, index: int
    ) -> list[Key]:
        session_id = live.session.session_id
        turn = (await self._backend.store.get_turns(session_id, since=index))[0]
        answered = key_from_stored(turn.answer_key)
        if isinstance(answered, RawKey):
            raise RequestError(
                f"previous_response_id: turn {index} of this session has no messages",
                param="previous_response_id",
            )
        return [*continued(conversation, answered, load_answer(turn.answer))]

    async def _opened(self, request: Call) -> Ids:
        """See `_opening`; a long prefill is tokenised in a thread. Raises RequestError."""
        prefill = request.conversation.prefill or ""
        if len(prefill) > MAX_PREFILL_CHARS:
            raise RequestError(
                f"the assistant's last message is to be continued and has {len(prefill)} "
                f"characters, at most {MAX_PREFILL_CHARS} are allowed; send less of it",
                param="messages",
                status=413,
            )
        if len(prefill) > THREADED_PREFILL_CHARS:
            return await asyncio.to_thread(self._opening, request)
        return self._opening(request)

    def _opening(self, request: Call) -> Ids:
        """Raises RequestError."""
        rendering = self._backend.rendering
        forced, prefill = request.options.forced, request.conversation.prefill
        if forced is None:
            return EMPTY_IDS if prefill is None else rendering.prefill(prefill)
        offered = [tool["function"]["name"] for tool in request.conversation.callable_tools]
        if not offered or forced.name not in (None, *offered):
            raise RequestError(
                f"tool_choice: {forced.name or 'a call'!r} is required, but the tools are "
                f"{', '.join(offered)[:200] or 'empty'}; name one of them",
                param="tool_choice",
            )
        if prefill is not None:
            raise RequestError(
                "tool_choice: a tool call cannot be required if the last message is the "
                "assistant's; remove one of the two",
                param="tool_choice",
            )
        return rendering.opening(required_tool(request))

    async def _is_given_again(self, live: LiveSession, asked: Asked) -> bool:
        """Whether the request gets recorded answers again, for which nothing is sampled."""
        same = live.tree.same_requests(asked.request_key)
        same = [node for node in same if node.index >= live.session.recorded_turns]
        await live.until_deserted_are_settled({node.index for node in same})
        running = self._latest_of(live, asked) is not None
        return not running and live.retries.has(live.tree, same, asked)

    def _admit(self, live: LiveSession, request: Call) -> None:
        """Raises RequestError if a limit of the session does not allow this call.

        Turns that ended before their first token (an engine was down) do not count.
        """
        limits, in_flight = {**self._limits, **live.session.limits}, live.in_flight
        if len(in_flight) >= limits["max_concurrent_calls"]:
            raise RequestError(
                f"{len(in_flight)} calls of this session are in flight, and its "
                f"max_concurrent_calls is {limits['max_concurrent_calls']}; wait for one to end",
                status=429,
                code="max_concurrent_calls",
                retry_after_s=1.0,
            )
        running = sum(call.answers for call in in_flight)
        turns = live.tree.sampled_turns + running + request.n
        for name, value in (("max_turns", turns), ("max_tokens", live.tree.sampled_tokens)):
            if value > limits[name]:
                raise RequestError(
                    f"this session has reached its {name} of {limits[name]}", status=403, code=name
                )


def _not_shown(tools: Iterable[Mapping[str, Any]]) -> Note:
    names = ", ".join(tool["function"]["name"] for tool in tools)
    return Note("tools_left_out", "template", "tools", names[:NOTED_CHARS])
