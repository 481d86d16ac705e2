"""A call: one request of an agent, from its place in the token tree to its recorded answers.

    PLACING ─▶ BEGUN ─▶ SAMPLING ─▶ RECORDING ─▶ ENDED

A call is one object and one task. The HTTP requests that wait for its answer (the first one and the
retries that join it) only watch it.

PLACING     nothing is recorded.
            → BEGUN      the intents of all answers are durable.
            → RECORDING  the answers are recorded already and are replayed (`retries`).
            → ENDED      the request is refused (RequestError, SessionError), another process holds
                         the session (HeldElsewhere), the store fails, or the call is aborted.
                         Intents that were recorded, or may have been, are closed as CUT.
BEGUN       every answer has a turn that is OPEN; nothing is sampled. → SAMPLING, always.
SAMPLING    → RECORDING  every answer is sampled to its end; or the engine fails or the call is
                         aborted while one is incomplete, and all answers become CUT.
RECORDING   → PLACING    an answer lacks its required tool call (`forced_call`), or calls a tool
                         that the proxy runs (`provider_tools`); if not aborted.
            → ENDED      every turn is DONE or CUT in the store. If recording fails, turns are
                         closed, or their answers marked as not arrived (`Ownership.close`).
ENDED       watchers get the answers or the error. When the answer has arrived at one of them, or
            the last one has left, the call is settled: `Deliveries` records which it was.

`abort` is the only way to end a call early: the last watcher leaves, the session ends, the call
takes longer than `limits.call_timeout_s`, or the proxy stops. It never interrupts a write to the
store. Invariant: nothing is sampled before its intent is durable; no watcher gets an answer before
its turns are durable; however a call ends, none of its turns stays OPEN.

What the task of a call awaits, in this order ([w] is a write to the store, which nothing
interrupts):

    PLACING     with `LiveSession.placing`, so one call of a session at a time:
                 1  `Ownership.settle`: failed closes, the record if stale, the holder
                 2  [w] a branch: an event of what it tolerates or how it diverged
                 3  deserted calls of equal requests, until they are settled
                 4  a replay: its turns from the store; or
                    [w] each rejected turn becomes SUPERSEDED, in the store before in the tree
                 5  for each answer: rendering, in a thread if it is long; [w] images that the
                    session has not had yet
                 6  [w] its intent, in the store before in the tree
                 7  [w] events about its request
    SAMPLING     8  room in an engine's cache, then the engine, for all answers at once
    RECORDING    9  [w] for each answer: its turn, in the store before in the tree
    PLACING     10  a required call: 1, 6 to 9 again; or its replay
                11  calls that the proxy runs: their results (no lock), [w] an event, 1 and 4 to 9
    any         12  [w] `Ownership.close`, if an intent has no record

Between a write and the change of the tree that follows it nothing is awaited. The end of the task
deregisters the call and wakes the watchers without waiting (`_end`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from enum import Enum, auto
from typing import Any

import msgspec
from msgspec import structs

from proxy.conversation import ConversationKey, Key
from proxy.errors import EngineError, ProxyError, QuotaReached, StoreError
from proxy.records import ForkCause, Turn, TurnStatus
from proxy.records.images import engine_ids
from proxy.rendering.deltas import ResultDelta
from proxy.serving.answer import AnswerStream, LiveAnswer, replayed_answer, sample_all
from proxy.serving.asked import Asked
from proxy.serving.backend import Backend
from proxy.serving.forced_call import joined, lacks_call, place_call
from proxy.serving.prompt_bounds import refuse_overlong
from proxy.serving.provider_tools import MAX_ANSWERS, next_request
from proxy.serving.provider_tools import joined as joined_answers
from proxy.serving.retries import Replay
from proxy.serving.sessions import LiveSession
from proxy.store.protocol import TurnConflict
from proxy.token_tree.tree import Placement
from proxy.wire.dialect import Outcome, Piece
from proxy.wire.provided import is_error

MAX_CONFLICTS = 16
"""Number of times that other processes may take a turn's index before the call gives up."""


class Fresh(msgspec.Struct, frozen=True):
    """Answers to be sampled, each with a recorded intent."""

    answers: tuple[LiveAnswer, ...]


class Replayed(msgspec.Struct, frozen=True):
    """Recorded answers that are sent again."""

    turns: tuple[Turn, ...]


class CallState(Enum):
    """See the module's docstring."""

    PLACING = auto()
    BEGUN = auto()
    SAMPLING = auto()
    RECORDING = auto()
    ENDED = auto()


class LiveCall:
    """A call of a session that this process serves. Call `start` once."""

    def __init__(
        self,
        backend: Backend,
        live: LiveSession,
        asked: Asked,
        on_end: Callable[[LiveCall], None] = lambda call: None,
    ) -> None:
        """`on_end` is called when the call has ended, before its watchers get the answers."""
        self.asked = asked
        self.state = CallState.PLACING
        self.stream = AnswerStream()
        self.turns: list[int] = []
        """Index of each answer's turn; empty while placing."""
        self.prompt_tokens = 0
        self.watchers: set[Watcher] = set()
        self.settled = asyncio.Event()
        """Set when it is known whether the answers have arrived."""
        self.backend = backend
        self.live = live
        self._on_end = on_end
        self._unrecorded: set[int] = set()
        """Turns whose intent is or may be durable, and whose answer is not."""
        self._begun: list[LiveAnswer] = []
        self._diverged = False
        """Whether a branch's request is not the recorded one."""
        self._answered: list[int] = []
        """Turns whose answers are recorded and sent to the watchers."""
        self._interruptible = True
        self._aborted: ProxyError | None = None
        self._task: asyncio.Task[list[Outcome]] | None = None
        self._timer: asyncio.TimerHandle | None = None

    @property
    def answers(self) -> int:
        """Number of answers that the agent wants."""
        return self.asked.request.n

    @property
    def ended(self) -> bool:
        return self.state is CallState.ENDED

    @property
    def abandoned(self) -> bool:
        """Whether the call is being aborted."""
        return self._aborted is not None and self.state is not CallState.RECORDING

    def start(self) -> None:
        """Registers the call with its session and runs it."""
        self.live.running.add(self)
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self.backend.call_timeout_s, self._time_out)
        self._task = loop.create_task(self._run())
        self._task.add_done_callback(self._end)

    def abort(self, why: ProxyError) -> None:
        """Ends the call early with the error `why`. Further calls have no effect."""
        if self._aborted is None and not self.ended:
            self._aborted = why
            if self._interruptible and self._task is not None:
                self._task.cancel()

    async def wait(self) -> None:
        """Returns when the call has ended in any way."""
        if self._task is not None:
            await asyncio.wait([self._task])

    def watched(self, is_connected: Callable[[], bool]) -> Watcher:
        """A connection that watches the call. If the last one leaves early, the call is aborted."""
        return Watcher(self, is_connected)

    @property
    def deserted(self) -> bool:
        """Whether the answers are recorded, and no agent is there to get them."""
        return self.ended and not self.is_awaited

    @property
    def is_awaited(self) -> bool:
        """Whether the connection of an agent that watches the call is open."""
        return any(watcher.is_connected() for watcher in self.watchers)

    def left_by(self, watcher: Watcher) -> None:
        """Ends the watching. `Watcher` calls it."""
        self.watchers.discard(watcher)
        if not self.watchers and self.state not in (CallState.RECORDING, CallState.ENDED):
            self.abort(EngineError("the client closed its connection"))
        elif self.ended and (watcher.arrived or not self.watchers):
            self._settle(arrived=watcher.arrived and not self.stream.failed)

    async def _run(self) -> list[Outcome]:
        try:
            opening = await self._open(self._decide)
            if isinstance(opening, Replayed):
                self.state = CallState.RECORDING
                outcomes = [self._sent_again(n, turn) for n, turn in enumerate(opening.turns)]
            else:
                outcomes = await self._answer(opening.answers)
            replayed = isinstance(opening, Replayed)
            return [
                await self._with_results(n, await self._with_call(n, outcome), replayed=replayed)
                for n, outcome in enumerate(outcomes)
            ]
        finally:
            self._interruptible = False
            if self._unrecorded:
                await self.backend.ownership.close(self.live, self._unrecorded)

    async def _open(self, begin: Callable[[], Awaitable[Fresh | Replayed]]) -> Fresh | Replayed:
        live, ownership = self.live, self.backend.ownership
        for _ in range(MAX_CONFLICTS):
            # One call of a session at a time, because each needs a tree with all earlier turns.
            async with live.placing:
                if live.closing or not live.up_to_date:
                    await ownership.settle(live)
                try:
                    return await begin()
                except TurnConflict:
                    await ownership.reload(live)
        raise StoreError("other proxies keep writing to this session; try again")

    async def _decide(self) -> Fresh | Replayed:
        live = self.live
        if live.branch is not None and not self._begun and not self._diverged:
            found = await live.branch.open(
                live.tree, live.retries, self.asked, self.backend.metrics, self._record_event
            )
            if isinstance(found, Replay):
                return await self._replay(found)
            self._diverged = found is not None
        same = live.tree.same_requests(self.asked.request_key)
        same = [node for node in same if node.index >= live.session.recorded_turns]
        if same and not self._begun:
            await live.until_deserted_are_settled({node.index for node in same})
            decision = live.retries.decide(live.tree, same, live.being_sent, self.asked)
            if isinstance(decision, Replay):
                return await self._replay(decision)
            await self._supersede(decision.supersedes)
        while len(self._begun) < self.asked.request.n:
            self._begun.append(await self._begin(len(self._begun)))
        self.state = CallState.BEGUN
        begun, self._begun = tuple(self._begun), []
        return Fresh(begun)

    async def _with_call(self, choice: int, said: Outcome) -> Outcome:
        """The answer, with the tool call that the agent requires if the model made none."""
        if not self.watchers or not lacks_call(self.asked, said):
            return said
        if self._aborted is not None:
            raise asyncio.CancelledError
        live, backend = self.live, self.backend

        async def begin() -> Fresh | Replayed:
            tree, retries = live.tree, live.retries
            if live.branch is None:
                recorded = retries.required_call(tree, self.asked, said)
            else:
                rendering = backend.rendering
                recorded = live.branch.required_call(tree, retries, self.asked, said, rendering)
            if recorded is not None:
                return await self._replay(recorded)
            return Fresh((await self._begin(choice, said),))

        self.state, self._interruptible = CallState.PLACING, True
        opening = await self._open(begin)
        if isinstance(opening, Replayed):
            called = self._sent_again(choice, opening.turns[0], continues=True)
        else:
            (called,) = await self._answer(opening.answers)
        return joined(said, called)

    async def _with_results(self, choice: int, said: Outcome, *, replayed: bool) -> Outcome:
        """The answer, with the results of the calls that the proxy runs and what the model says
        after them. `replayed`: what is recorded of this is sent again."""
        asked, before = self.asked, list[Outcome]()
        live, tools = self.live, self.asked.request.provider_tools
        while tools and self.watchers and any(c.name in tools for c in said.message.tool_calls):
            if self._aborted is not None:
                raise asyncio.CancelledError
            self.state, self._interruptible = CallState.PLACING, True
            made = sum(len(outcome.results) for outcome in before)
            results = await self.backend.provider_tools.run(
                *(live.session.session_id, live.results, asked, said, made), replayed=replayed
            )
            if not replayed:
                await self._report(said.turn, results)
            self.stream.push(Piece(choice, results, turn=said.turn))
            said = structs.replace(said, results=results)
            if len(results) < len(said.message.tool_calls) or len(before) == MAX_ANSWERS - 1:
                break
            before.append(said)
            answered = live.tree.nodes[said.turn].answer_key
            assert isinstance(answered, ConversationKey)
            asked = next_request(asked, said, answered)
            said, replayed = await self._follow(choice, asked, said.turn, replayed=replayed)
        return joined_answers(before, said) if before else said

    async def _follow(
        self, choice: int, asked: Asked, after: int, *, replayed: bool
    ) -> tuple[Outcome, bool]:
        """The answer to a request that follows turn `after` in this call, and whether it was
        recorded before."""
        live = self.live

        async def begin() -> Fresh | Replayed:
            same = live.tree.same_requests(asked.request_key)
            ended = [n.index for n in same if n.status in (TurnStatus.DONE, TurnStatus.CONTEXT)]
            if replayed and ended:
                return await self._replay(Replay((ended[-1],)))
            answer = await self._begin(choice, follows=asked)
            live.retries.continued.setdefault(after, []).append(self.turns[-1])
            return Fresh((answer,))

        opening = await self._open(begin)
        if isinstance(opening, Replayed):
            return self._sent_again(choice, opening.turns[0]), True
        (outcome,) = await self._answer(opening.answers)
        return outcome, False

    async def _report(self, index: int, results: Sequence[ResultDelta]) -> None:
        """Records an event for calls that the proxy has run."""
        calls = []
        for result in results:
            failed = is_error(result.text)
            self.backend.metrics.provider_tool(result.call.name, is_error=failed)
            call = {"id": result.call.id, "name": result.call.name, "chars": len(result.text)}
            calls.append({**call, "error": result.text if failed else None})
        with self._uninterrupted(), suppress(StoreError):
            await self.live.record(self.backend.store, "provider_tools", index=index, calls=calls)

    def _sent_again(self, choice: int, turn: Turn, *, continues: bool = False) -> Outcome:
        tree = self.live.tree
        prompt = tree.prompt(turn.parent, turn.shared_tokens, turn.prompt_ids)
        rendering = self.backend.rendering
        piece, outcome = replayed_answer(
            *(turn, engine_ids(prompt, tree.prompt_images(turn)), self.asked, rendering, choice),
            only_calls=continues,
        )
        self.stream.push(piece)
        return outcome

    async def _replay(self, decision: Replay) -> Replayed:
        live, indexes = self.live, decision.indexes
        live.own.update(indexes)
        self.prompt_tokens = self.prompt_tokens or live.tree.nodes[indexes[0]].prompt_tokens
        self.turns += indexes
        self._answered += indexes
        turns = await self.backend.store.get_turns(
            live.session.session_id, since=indexes[0], until=indexes[-1] + 1
        )
        return Replayed(tuple(turn for turn in turns if turn.index in indexes))

    async def _supersede(self, indexes: Sequence[int]) -> None:
        live = self.live
        for index in indexes:
            with self._uninterrupted():
                await self.backend.store.set_turn_status(
                    live.session.session_id, index, TurnStatus.SUPERSEDED
                )
                live.tree.nodes[index].status = TurnStatus.SUPERSEDED
                live.publish("superseded", index=index)

    async def _begin(
        self, choice: int, said: Outcome | None = None, follows: Asked | None = None
    ) -> LiveAnswer:
        """Records an intent; returns its answer, which continues `said` with a tool call if given,
        or answers `follows`, a request of this call's own.

        Raises TurnConflict if the index is taken."""
        live, backend, asked = self.live, self.backend, follows or self.asked
        if said is not None:
            asked, placement = place_call(asked, said, live.tree, backend.rendering)
        elif self.turns and follows is None:
            placement = live.tree.sibling(live.tree.nodes[self.turns[0]])
        else:
            placement = await self._place(asked)
            if self._diverged and follows is None:
                placement = structs.replace(placement, cause=ForkCause.DIVERGED)
        answer = LiveAnswer(backend, live, self.stream, asked, choice, placement, said)
        await self._record_images(answer.intent)
        await self._record_intent(answer.intent, asked.request_key)
        if asked.tidied or asked.request.notes:
            with self._uninterrupted(), suppress(StoreError):
                for note in await live.note(backend.store, answer.intent.index, asked):
                    backend.metrics.noted(note.kind, note.name)
        return answer

    async def _place(self, asked: Asked) -> Placement:
        tree, rendering = self.live.tree, self.backend.rendering
        muted = rendering.muted_tokens
        conversation = asked.request.conversation
        asked_before = tree.same_requests(asked.request_key)
        if asked_before:
            return tree.sibling(asked_before[-1])
        in_thread = asked.request.is_large
        if not asked.request.is_small:
            since = tree.match(asked.keys).answered + 1
            long = await refuse_overlong(conversation, since, rendering, self.backend.room)
            in_thread = in_thread or long
        if in_thread:
            placement = await asyncio.to_thread(tree.place, conversation, asked.keys, rendering)
        else:
            placement = tree.place(conversation, asked.keys, rendering)
        if rendering.muted_tokens != muted:  # perhaps those of a call beside this one
            new = conversation.messages[tree.match(asked.keys).answered + 1 :]
            self._report_spelled(rendering.spelled_tokens(new))
        return placement.followed_by(asked.opening)

    def _report_spelled(self, tokens: int) -> None:
        """Control tokens that new texts of users and tools spell, which became ordinary text."""
        if tokens:
            self.backend.metrics.spelled(tokens)
            self.live.publish("control_tokens", index=len(self.live.tree), tokens=tokens)

    async def _record_images(self, turn: Turn) -> None:
        """Stores what the turn is the first one to name, before its intent."""
        live, sent = self.live, self.asked.request.images
        named = {image.sha256 for image in turn.images}
        if named <= live.images:
            return
        assert sent is not None  # the images of a turn are those of its request
        with self._uninterrupted():
            await self.backend.images.record(live, sorted(named - live.images), sent)
            live.images |= named

    async def _record_intent(self, turn: Turn, key: Key) -> None:
        """If it fails in any other way than these two, the intent may have been recorded."""
        live = self.live
        self._unrecorded.add(turn.index)
        live.own.add(turn.index)
        with self._uninterrupted():
            try:
                await self.backend.store.begin_turn(turn, live.session.quota)
            except (TurnConflict, QuotaReached):
                self._unrecorded.discard(turn.index)
                live.own.discard(turn.index)
                raise
            live.tree.begin(turn, key)
            self.turns.append(turn.index)
            self.prompt_tokens = turn.prompt_tokens

    async def _answer(self, answers: Sequence[LiveAnswer]) -> list[Outcome]:
        self.state = CallState.SAMPLING
        try:
            await sample_all(answers)
        finally:
            self.state = CallState.RECORDING
            self._interruptible = False
            for answer in answers:
                await self._record(answer)
        return [answer.outcome for answer in answers]

    async def _record(self, answer: LiveAnswer) -> None:
        live, turn = self.live, answer.finished()
        await self.backend.store.commit_turn(turn, live.session.quota)
        live.tree.commit(turn, answer.outcome.message, answer.key)
        self._unrecorded.discard(turn.index)
        if turn.status is TurnStatus.DONE:
            self._answered.append(turn.index)
        else:
            live.own.discard(turn.index)
        self.backend.metrics.recorded(turn, self.asked.request.model)
        self.backend.on_turn(live.session.session_id, turn, self.asked.request.model)
        live.publish("turn", index=turn.index, status=turn.status, finish_reason=turn.finish_reason)

    async def _record_event(self, kind: str, data: dict[str, Any]) -> None:
        with self._uninterrupted():
            await self.live.record(self.backend.store, kind, **data)

    @contextmanager
    def _uninterrupted(self) -> Iterator[None]:
        """An abort takes effect at the end of the block, which writes to the store."""
        self._interruptible = False
        try:
            yield
        except BaseException:
            self.live.stale = True  # the store may have done what it says has failed
            raise
        finally:
            self._interruptible = True
            if self._aborted is not None:
                raise asyncio.CancelledError

    def _time_out(self) -> None:
        limit_s = self.backend.call_timeout_s
        message = f"the call did not end within {limit_s:g} s (limits.call_timeout_s)"
        self.abort(EngineError(message, status=504))

    def _end(self, task: asyncio.Task[list[Outcome]]) -> None:
        self.state = CallState.ENDED
        self._task = None
        if self._timer is not None:
            self._timer.cancel()
        self._on_end(self)
        if task.cancelled():
            self.stream.fail(self._aborted or EngineError("the call was cancelled; try again"))
        elif (error := task.exception()) is not None:
            error.__traceback__ = None  # its frames refer to the call, as they do in the task
            self.stream.fail(error)
        else:
            self.stream.finish(task.result())
        if not self.watchers:
            self._settle(arrived=False)

    def _settle(self, *, arrived: bool) -> None:
        live = self.live
        if self not in live.running:
            return
        live.running.discard(self)
        self.settled.set()
        live.retries.settle(self.turns, streamed=self.asked.request.stream, arrived=arrived)
        for index in self._answered:
            self.backend.deliveries.mark(live, index, arrived=arrived)


class Watcher:
    """One HTTP request that waits for a call's answer, as a context manager."""

    def __init__(self, call: LiveCall, is_connected: Callable[[], bool]) -> None:
        """`is_connected`: whether the agent still waits for the response."""
        self.call = call
        self.is_connected = is_connected
        self.arrived = False
        """Set it when the whole answer was sent."""
        self.outcomes = call.stream.outcomes

    def __enter__(self) -> Watcher:
        self.call.watchers.add(self)
        return self

    def __exit__(self, *_: object) -> None:
        self.call.left_by(self)
