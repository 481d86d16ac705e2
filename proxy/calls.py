"""The call loop: place → record the intent → sample → stream → record the answer → end.

Invariant: nothing is sampled before its intent is durable, and no terminal event is sent before
its turn is. Whatever ends a call early (agent gone, engine dead, session closed, time out), its
turn is recorded as CUT with what was sampled so far, and is never trained. One request's answers
train at most once: a retry joins the running call, is served the recorded answer that never
arrived, or supersedes the one that the agent did not take.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, replace

import numpy as np

from proxy.answering import Answering, replayed
from proxy.conversation import (
    CHAIN,
    Conversation,
    continued,
    conversation_keys,
    load_answer,
    opened_key,
    raw_key,
)
from proxy.engines.protocol import Sampling
from proxy.errors import EngineError, RequestError, SessionError, StoreError
from proxy.live_call import LiveCall
from proxy.metrics import Metrics
from proxy.records import EMPTY_IDS, Ids, Turn, TurnStatus
from proxy.rendering.rendering import Rendering
from proxy.routing import Router
from proxy.sampling import as_record, resolve
from proxy.sessions import LiveSession, Sessions
from proxy.store.protocol import Store, TurnConflict
from proxy.token_tree import Placement
from proxy.wire.dialect import Call, Outcome

MAX_CONFLICTS = 16
"""Other proxies on the same store may take a turn's index this often before we give up."""
THREADED_CHARS = 50_000
"""Longer new text is tokenised in a thread: 50k characters take about 10 ms."""


@dataclass(frozen=True, slots=True)
class Caller:
    """What the transport knows of a request, beside its body."""

    dialect: str
    agent_id: str | None = None
    is_retry: bool = False
    """The client says so itself (`x-stainless-retry-count` above 0)."""


class Calls:
    def __init__(
        self,
        sessions: Sessions,
        rendering: Rendering,
        router: Router,
        store: Store,
        metrics: Metrics,
        *,
        context_tokens: int | None,
        call_timeout_s: float,
    ) -> None:
        """`context_tokens` bounds prompt and answer where no engine says a smaller number."""
        self._sessions = sessions
        self._rendering = rendering
        self._router = router
        self._store = store
        self._metrics = metrics
        self._running: set[LiveCall] = set()
        self._context_tokens = context_tokens
        self._call_timeout_s = call_timeout_s

    async def open(self, live: LiveSession, call: Call, caller: Caller) -> LiveCall:
        """The call, running; a retry gets the call (or the recorded answer) that it repeats.

        Raises RequestError, SessionError, HeldElsewhere or StoreError: nothing was sampled then.
        """
        call.opening = self._opening(call)
        live.in_flight += 1
        try:
            for _ in range(MAX_CONFLICTS):
                if live.unsettled:
                    async with live.placing:
                        await self._sessions.hold(live)
                keys, request_key = await self._keys(live, call)
                running = live.calls.get(request_key)
                if running is not None and caller.is_retry and not running.abandoned:
                    return running
                turns = await self._recorded(live, call, request_key)
                if not turns:
                    await self._supersede(live, call, caller, request_key)
                    turns = await self._begin(live, call, caller, keys, request_key)
                if turns:
                    return self._start(live, call, turns, keys[-1])
            raise StoreError("other proxies keep writing to this session; try again")
        finally:
            live.in_flight -= 1

    async def _keys(self, live: LiveSession, call: Call) -> tuple[list[bytes], bytes]:
        """The conversation's keys, and the key of this very request."""
        conversation = call.conversation
        if conversation.raw is not None:
            keys = [raw_key(conversation.raw)]
        elif conversation.continues is not None:
            keys = await self._continued(live, conversation, conversation.continues)
        else:
            keys = conversation_keys(conversation, with_reasoning=live.tree.follows)
        return keys, _request_key(keys[-1], call)

    async def _continued(
        self, live: LiveSession, conversation: Conversation, index: int
    ) -> list[bytes]:
        if not live.tree.answered(index):  # or another process has, since the tree was read
            async with live.placing:
                await self._sessions.reload(live)
        if not live.tree.answered(index):
            raise RequestError(
                f"previous_response_id: turn {index} of this session has no answer",
                param="previous_response_id",
                status=404,
            )
        turn = (await self._store.get_turns(live.session.session_id, since=index))[0]
        return continued(conversation, turn.answer_key, load_answer(turn.answer))

    async def close(self, grace_s: float) -> None:
        """Lets running calls end for `grace_s`, then cuts them; returns when all are recorded."""
        calls = list(self._running)
        try:
            async with asyncio.timeout(grace_s):
                await asyncio.gather(*(call.ended() for call in calls))
        except TimeoutError:
            for call in calls:
                call.abort(EngineError("the proxy is stopping; try again"))
            await asyncio.gather(*(call.ended() for call in calls))

    def _room(self) -> int | None:
        known = [n for n in (self._context_tokens, self._router.context_tokens) if n is not None]
        return min(known, default=None)

    def _start(
        self,
        live: LiveSession,
        call: Call,
        turns: list[tuple[Turn, Sampling | None]],
        answered_from: bytes,
    ) -> LiveCall:
        first = turns[0][0]
        running = LiveCall(
            first.request_key, [turn.index for turn, _ in turns], first.prompt_tokens
        )
        live.in_flight += 1
        live.calls[running.request_key] = running
        self._running.add(running)
        live.running.add(running)
        running.start(self._run(live, call, running, turns, answered_from))
        return running

    async def _run(
        self,
        live: LiveSession,
        call: Call,
        running: LiveCall,
        turns: list[tuple[Turn, Sampling | None]],
        answered_from: bytes,
    ) -> list[Outcome]:
        try:
            async with asyncio.timeout(self._call_timeout_s):
                return await self._answers(live, call, running, turns, answered_from)
        except TimeoutError:
            raise EngineError(
                f"the call did not end within {self._call_timeout_s} s", status=504
            ) from None
        finally:
            live.in_flight -= 1
            live.own.difference_update(running.turns)
            self._running.discard(running)
            live.running.discard(running)
            if live.calls.get(running.request_key) is running:
                del live.calls[running.request_key]

    def settle(self, live: LiveSession, running: LiveCall, *, arrived: bool) -> None:
        """A watcher has ended: the answer arrived there whole, or its connection broke."""
        running.delivered = running.delivered or arrived
        if running.delivered:
            live.undelivered.pop(running.request_key[CHAIN], None)
        else:
            live.undelivered[running.request_key[CHAIN]] = running.turns

    async def _answers(
        self,
        live: LiveSession,
        call: Call,
        running: LiveCall,
        turns: list[tuple[Turn, Sampling | None]],
        answered_from: bytes,
    ) -> list[Outcome]:
        answers = []
        for choice, (turn, sampling) in enumerate(turns):
            if sampling is None:
                answers.append(replayed(running, choice, turn))
                continue
            prompt = live.tree.prompt(turn.parent, turn.shared_tokens, turn.prompt_ids)
            answering = Answering(
                live, call, running, choice, turn, sampling, prompt, answered_from,
                self._rendering, self._router, self._store, self._metrics,
            )  # fmt: skip
            answers.append(answering.run())
        if len(answers) == 1:
            return [await answers[0]]
        tasks = [asyncio.create_task(answer) for answer in answers]
        try:
            return await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise

    async def _begin(
        self,
        live: LiveSession,
        call: Call,
        caller: Caller,
        keys: list[bytes],
        request_key: bytes,
    ) -> list[tuple[Turn, Sampling | None]]:
        """One turn per answer, with its intent on disk; none when another process was faster."""
        begun: list[tuple[Turn, Sampling | None]] = []
        conflicts = 0
        while len(begun) < call.n:
            # One at a time in a session: who conflicts with another proxy reads the tree anew, and
            # no turn may hang on one that was to have the index which the other took.
            async with live.placing:
                first = begun[0][0] if begun else None
                if first is None and live.unsettled - live.unheld:
                    return []
                turn = await self._intend(live, call, caller, keys, request_key, first, len(begun))
            if turn is not None:
                begun.append(turn)
            elif not begun:
                return []
            elif (conflicts := conflicts + 1) > MAX_CONFLICTS:
                raise StoreError("other proxies keep writing to this session; try again")
        return begun

    async def _intend(
        self,
        live: LiveSession,
        call: Call,
        caller: Caller,
        keys: list[bytes],
        request_key: bytes,
        first: Turn | None,
        sibling: int,
    ) -> tuple[Turn, Sampling] | None:
        """One turn, its intent on disk; None when another proxy was faster."""
        if first is not None:
            placement = live.tree.sibling(live.tree.nodes[first.index])
        else:
            placement = await self._place(live, call, keys, request_key)
        sampling = resolve(
            live.session,
            call.options,
            prompt_tokens=placement.shared_tokens + len(placement.prompt_ids),
            context_tokens=self._room(),
            stop_token_ids=self._rendering.stop_token_ids,
            sibling=sibling,
        )
        turn = _intended(live, caller, request_key, placement, sampling)
        if not await self._record_intent(live, turn):
            return None
        live.tree.nodes[turn.index].streamed = call.stream
        return turn, sampling

    def _opening(self, call: Call) -> Ids:
        """Raises RequestError."""
        forced, prefill = call.options.forced, call.conversation.prefill
        if forced is None:
            return EMPTY_IDS if prefill is None else self._rendering.prefill(prefill)
        offered = [tool["function"]["name"] for tool in call.conversation.tools]
        if not offered or forced.name not in (None, *offered):
            raise RequestError(
                f"tool_choice: {forced.name or 'a call'!r} is forced, tools offers "
                f"{', '.join(offered)[:200] or 'none'}",
                param="tool_choice",
            )
        if prefill is not None:
            raise RequestError(
                "tool_choice: a call cannot be forced where the last message is the assistant's",
                param="tool_choice",
            )
        only = offered[0] if len(offered) == 1 else None
        return self._rendering.opening(forced.name or only)

    async def _place(
        self, live: LiveSession, call: Call, keys: list[bytes], request_key: bytes
    ) -> Placement:
        tree, rendering, conversation = live.tree, self._rendering, call.conversation
        asked_before = tree.same_requests(request_key)
        if asked_before:
            return tree.sibling(asked_before[-1])
        new = conversation.messages[tree.match(keys).answered + 1 :]
        if sum(len(m.text) for m in new) + len(conversation.raw or "") > THREADED_CHARS:
            placement = await asyncio.to_thread(tree.place, conversation, keys, rendering)
        else:
            placement = tree.place(conversation, keys, rendering)
        if len(call.opening):
            ids = np.concatenate([placement.prompt_ids, call.opening])
            return replace(placement, prompt_ids=ids)
        return placement

    async def _record_intent(self, live: LiveSession, turn: Turn) -> bool:
        """False when another proxy took the index first: its turns are read, and we place anew."""
        live.tree.begin(turn)
        try:
            await self._store.begin_turn(turn)
        except TurnConflict:
            await self._sessions.reload(live)
            return False
        except (StoreError, SessionError):
            self._sessions.forget(live)
            raise
        live.own.add(turn.index)
        return True

    async def _recorded(
        self, live: LiveSession, call: Call, request_key: bytes
    ) -> list[tuple[Turn, Sampling | None]] | None:
        """Answers to this very request that are recorded but never arrived whole."""
        indexes = live.undelivered.pop(request_key[CHAIN], None)
        if indexes is None:
            same = live.tree.same_requests(request_key)
            indexes = [n.index for n in same if n.index < live.loaded_turns and not n.children]
        done = [i for i in indexes if live.tree.nodes[i].status is TurnStatus.DONE]
        done = [i for i in done if i not in live.replayed][-call.n :]
        if len(done) < call.n:
            return None
        live.replayed.update(done)
        turns = await self._store.get_turns(live.session.session_id, since=done[0])
        return [(turn, None) for turn in turns if turn.index in done]

    async def _supersede(
        self, live: LiveSession, call: Call, caller: Caller, request_key: bytes
    ) -> None:
        """The agent asks again for what it was answered, and never went on from the answer: by a
        retry, in another form, or with more room than the answer had."""
        room = call.options.max_tokens
        for node in live.tree.same_requests(request_key):
            other_form = node.streamed is not None and node.streamed != call.stream
            taken = node.status is not TurnStatus.DONE or node.children
            longer = room is not None and (node.truncated_at or room) < room
            if taken or not (other_form or longer or caller.is_retry):
                continue
            await self._store.set_turn_status(
                live.session.session_id, node.index, TurnStatus.SUPERSEDED
            )
            node.status = TurnStatus.SUPERSEDED
            live.publish("superseded", index=node.index)


def _request_key(asked: bytes, call: Call) -> bytes:
    forced, prefill = call.options.forced, call.conversation.prefill
    if forced is not None:
        return opened_key(asked, b"forced", forced.name or "")
    return asked if prefill is None else opened_key(asked, b"prefill", prefill)


def _intended(
    live: LiveSession, caller: Caller, request_key: bytes, placement: Placement, sampling: Sampling
) -> Turn:
    return Turn(
        session_id=live.session.session_id,
        index=len(live.tree),
        parent=placement.parent,
        shared_tokens=placement.shared_tokens,
        fork_cause=placement.cause,
        prompt_ids=placement.prompt_ids,
        request_key=request_key,
        sampling=as_record(sampling),
        dialect=caller.dialect,
        agent_id=caller.agent_id,
        started_at=time.time(),
    )
