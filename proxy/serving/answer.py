"""One answer of a call: its turn, from the intent to the record, with its parser and generation.

    intent    the turn before sampling, which the call makes durable
    sample    the engine's chunks go through the parser to the call's `AnswerStream`
    finished  the turn to record

Invariant: the turn holds exactly what the engine returned: each id with its log-probability and the
version of the weights that sampled it, even if the answer was cut. Every watcher of a stream gets
every piece from the first one on, whenever it joins. The stream ends once, with the recorded
answers or with the error that ended the call.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from msgspec import structs

from proxy.conversation.free_form import with_free_calls
from proxy.conversation.message_keys import Key, RawKey, raw_key
from proxy.conversation.messages import Message, dump_answer, load_answer
from proxy.engines.protocol import Chunk
from proxy.errors import RequestError
from proxy.records import (
    FinishReason,
    ForkCause,
    Ids,
    Turn,
    TurnStatus,
    ids_of,
    logprobs_of,
)
from proxy.records.alternatives import CollectedAlternatives
from proxy.records.images import engine_ids
from proxy.rendering.deltas import Delta, ReasoningDelta, TextDelta, send_calls
from proxy.rendering.prefix_stream import PrefixParser
from proxy.rendering.rendering import CONTEXT_TOKENS, Rendering
from proxy.rendering.stream import AnswerParser
from proxy.rendering.whole import WholeParser
from proxy.routing.cache_room import RoomClaim
from proxy.routing.generation import Generation, Seam
from proxy.sampling import as_record, resolve, seed_of_call
from proxy.serving.asked import Asked
from proxy.serving.backend import Backend
from proxy.serving.sessions import LiveSession
from proxy.serving.text_tokens import TextTokens, reasoning_tokens
from proxy.token_tree.tree import Placement
from proxy.wire.dialect import Outcome, Piece, SampledToken

WAIT_SHARE = 0.1
"""The share of the time that a session has left for which one of its calls may be paused."""


class AnswerStream:
    """The pieces of a call's answers in order, followed by the answers themselves."""

    def __init__(self) -> None:
        self.pieces: list[Piece] = []
        self.followers: list[Callable[[], None]] = []
        """Called after each piece, and at the end. They must not raise."""
        self._ends: list[asyncio.Future[Sequence[Outcome]]] = []
        self._result: Sequence[Outcome] | BaseException | None = None

    @property
    def ended(self) -> bool:
        """Whether `finish` or `fail` was called."""
        return self._result is not None

    @property
    def failed(self) -> bool:
        """Whether the watchers got an error in the place of the answers."""
        return isinstance(self._result, BaseException)

    def push(self, piece: Piece) -> None:
        """Adds a piece for all watchers."""
        self.pieces.append(piece)
        for follower in self.followers:
            follower()

    def finish(self, outcomes: Sequence[Outcome]) -> None:
        """Ends the stream with the recorded answers."""
        self._result = outcomes
        self._end()

    def fail(self, error: BaseException) -> None:
        """Ends the stream with `error`, which every watcher raises."""
        self._result = error
        self._end()

    def outcomes(self) -> asyncio.Future[Sequence[Outcome]]:
        """The recorded answers, or the error that ended the call. Await it."""
        end: asyncio.Future[Sequence[Outcome]] = asyncio.get_running_loop().create_future()
        self._ends.append(end)
        if self.ended:
            self._end()
        return end

    def _end(self) -> None:
        for follower in self.followers:
            follower()
        ends, self._ends = self._ends, []
        for end in ends:
            if end.done():  # its watcher has left
                continue
            if isinstance(self._result, BaseException):
                end.set_exception(self._result)
            elif self._result is not None:
                end.set_result(self._result)


class _TextEnded(Exception):
    """The text has ended, at a stop string or a second call, and the engine does not know it."""


class LiveAnswer:
    """One answer of a call. Await `sample` once, then call `finished`."""

    outcome: Outcome
    """The answer as the agent gets it, for after it is recorded. Set by `finished`."""
    key: Key
    """The key of the conversation with the answer appended. Set by `finished`."""

    def __init__(
        self,
        backend: Backend,
        live: LiveSession,
        stream: AnswerStream,
        asked: Asked,
        choice: int,
        placement: Placement,
        continued: Outcome | None = None,
    ) -> None:
        """`choice` is the answer's index in the call, `placement` its prompt's place in the tree;
        `continued` is the recorded answer that this one continues with a call.

        Raises RequestError if the request's options cannot be met.
        """
        self._backend = backend
        self._live = live
        self._stream = stream
        self._asked = asked
        self._choice = choice
        self._continued = continued
        self._prompt = placement.prompt
        self._images = placement.images
        self._sampling = resolve(
            live.session,
            asked.request.options,
            prompt_tokens=len(placement.prompt),
            context_tokens=backend.room,
            stop_token_ids=backend.rendering.stop_token_ids,
            policy=asked.policy,
            conversation=asked.request.conversation,
            sibling=choice,
            routed_tokens=live.tree.routed(placement.parent, placement.shared_tokens),
            structured=_grammar(asked, placement.prompt, backend.rendering),
        )
        if (session_seed := live.session.sampling.get("seed")) is not None:
            same = live.tree.same_requests(asked.request_key)
            answered = sum(node.status is not TurnStatus.CUT for node in same)
            seed = seed_of_call(int(session_seed), placement.prompt, answered, choice)
            self._sampling = structs.replace(self._sampling, seed=seed)
        images = backend.images.of_prompt(placement.images)
        if images is not None:
            self._sampling = structs.replace(self._sampling, images=images)
        self.intent = Turn(
            session_id=live.session.session_id,
            index=len(live.tree),
            parent=placement.parent,
            shared_tokens=placement.shared_tokens,
            fork_cause=placement.cause,
            prompt_ids=placement.prompt_ids,
            request_key=asked.request_key.stored(),
            sampling=as_record(self._sampling),
            dialect=asked.caller.dialect,
            agent_id=asked.caller.agent_id,
            started_at=time.time(),
            request=live.tree.new_messages(asked.request.conversation, asked.keys),
            images=placement.own_images,
        )
        self._given = None if live.branch is None else live.branch.given_answer(self.intent.index)
        """The text of an answer that is not sampled."""
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        alternatives = self._sampling.alternatives
        self._alternatives = CollectedAlternatives(alternatives) if alternatives else None
        self._tokens: list[SampledToken] = []
        self._text_tokens = _text_tokens(asked, backend.rendering)
        self._finish = FinishReason.CUT
        self._begun = time.perf_counter()
        self._first_token_s: float | None = None
        self._hidden_chars = self._begun_chars
        """Number of characters still to be left out, because they are the agent's own prefill."""
        self._parser = self._make_parser()
        self._generation = Generation(
            backend.router,
            self._prompt,
            self._sampling,
            request_id=self._call_id,
            session_id=self.intent.session_id,
            stream=self._streamed,
        )

    async def sample(self) -> None:
        """Samples the answer. Raises EngineError or RequestError if it does not reach its end."""
        self._begun = time.perf_counter()
        if self._given is not None:
            self._take_given(self._given)
        elif self._backend.router.schedules:
            await self._generate_in_turn()
        else:
            await self._generate()

    async def _generate_in_turn(self) -> None:
        """Generates when there is room in an engine's cache."""
        router, claim, policy = self._backend.router, self._claim, self._sampling.policy
        await router.until_admitted(claim, trained=self._sampling.trained, adapted=bool(policy))
        try:
            await self._generate()
        finally:
            router.left(claim, len(self._prompt) + len(self._ids), len(self._ids))

    async def _generate(self) -> None:
        with suppress(_TextEnded):
            await self._generation.sample(self._receive, self._resumed)

    def _receive(self, chunk: Chunk) -> None:
        """Raises _TextEnded if the rest of the answer is not wanted."""
        if self._first_token_s is None:
            self._first_token_s = time.perf_counter() - self._begun
        for piece in chunk.by_token() if self._ends_early else (chunk,):
            self._take(piece)
            if self._parser.ended:
                self._generation.keep(len(self._ids))
                break
        if self._parser.ended:
            self._finish = FinishReason.STOP
        elif chunk.finish_reason is not None:
            self._finish = chunk.finish_reason
        if self._parser.ended and chunk.finish_reason is None:
            raise _TextEnded

    def _take_given(self, text: str) -> None:
        rendering = self._backend.rendering
        ids = [*rendering.tokenizer.encode(text), *rendering.stop_token_ids[:1]]
        self._take(Chunk(ids, [0.0] * len(ids)))
        self._finish = FinishReason.STOP

    def cut(self) -> None:
        """Makes the answer an incomplete one."""
        self._finish = FinishReason.CUT

    def finished(self) -> Turn:
        """The turn to record: DONE, or CUT with what was sampled. Call it once."""
        rest, message = self._parser.finish()
        if self._continued is not None:
            message = structs.replace(self._continued.message, tool_calls=message.tool_calls)
        message = with_free_calls(message, self._asked.request.free_form)
        if self._finish is FinishReason.LENGTH and self._parser.ended:
            self._finish = FinishReason.STOP  # at the last token that the engine may sample
        cut, size = self._finish is FinishReason.CUT, len(self._ids)
        if self._finish is FinishReason.STOP and message.tool_calls:
            self._finish = FinishReason.TOOL_CALLS
        visible = self._visible(rest)
        tokens = self._rest_of_tokens(visible)
        said = self._without_prefill(message)
        self.key = self._answer_key(message)
        turn = structs.replace(
            self.intent,
            sampled_ids=ids_of(self._ids),
            logprobs=logprobs_of(self._logprobs),
            versions=self._generation.versions,
            finish_reason=self._finish,
            status=TurnStatus.CUT if cut else self._ended_as,
            first_token_s=self._first_token_s,
            duration_s=time.perf_counter() - self._begun,
            engine=self._generation.engine,
            routed_experts=None if cut else self._generation.routed_experts,
            alternatives=None if self._alternatives is None else self._alternatives.rows(),
            answer=dump_answer(said) if size else b"",
            answer_key=self.key.stored() if size else b"",
        )
        self.outcome = Outcome(
            message=said,
            finish_reason=self._finish,
            prompt_tokens=turn.prompt_tokens,
            cached_tokens=turn.shared_tokens,
            completion_tokens=size,
            reasoning_tokens=reasoning_tokens(
                self._backend.rendering.tokenizer, self._ids, said.reasoning
            ),
            stop_string=self._parser.stop_string,
            tokens=self._tokens,
            turn=turn.index,
            prompt_ids=engine_ids(self._prompt, self._images),
            sampled_ids=turn.sampled_ids,
        )
        if not cut and (visible or tokens):
            piece = Piece(self._choice, tuple(visible), tuple(tokens), self.intent.index)
            self._stream.push(piece)
        return turn

    def _rest_of_tokens(self, deltas: list[Delta]) -> list[SampledToken]:
        """The last tokens of the text, of which `deltas` are the rest."""
        if self._text_tokens is None:
            return []
        tokens = [*self._text_tokens.sent(deltas), *self._text_tokens.end()]
        self._tokens += tokens
        return tokens

    @property
    def _call_id(self) -> str:
        return f"{self.intent.session_id}#{self.intent.index}"

    @property
    def _claim(self) -> RoomClaim:
        """What decides whether the call waits for room in an engine's cache."""
        intent, session = self.intent, self._live.session
        longest_s = [max(0.0, session.expires_at - time.time()) * WAIT_SHARE]
        timeout_s = self._asked.caller.timeout_s
        if timeout_s is not None and not self._asked.request.stream:
            longest_s.append(timeout_s / 2)
        again = self._choice > 0 and intent.fork_cause is ForkCause.SIBLING
        return RoomClaim(
            call_id=self._call_id,
            session_id=intent.session_id,
            prompt_tokens=len(intent.prompt_ids) if again else len(self._prompt),
            max_tokens=self._sampling.max_tokens,
            group=str(session.metadata.get("group", session.metadata.get("task_id", ""))),
            max_wait_s=min(longest_s),
            prompt=None if again else self._prompt,
        )

    @property
    def _ended_as(self) -> TurnStatus:
        return TurnStatus.DONE if self._given is None else TurnStatus.CONTEXT

    def _resumed(self, seam: Seam) -> None:
        """An engine failed in mid-answer, and another call of an engine continues the answer."""
        self._backend.metrics.resumed(seam.cause.value)
        self._live.publish(
            "resumed",
            index=self.intent.index,
            at_token=seam.at_token,
            from_engine=seam.from_engine,
            to_engine=seam.to_engine,
            cause=seam.cause.value,
        )

    def _take(self, chunk: Chunk) -> None:
        self._ids += chunk.ids
        self._logprobs += chunk.logprobs
        if self._alternatives is not None:
            self._alternatives.add(len(chunk.ids), chunk.alternatives)
        deltas = self._parser.feed(chunk.ids)
        if self._hidden_chars or self._continued is not None:
            deltas = self._visible(deltas)
        if self._text_tokens is not None:
            tokens = self._text_tokens.feed(chunk, deltas)
        else:
            tokens = _shown(self._asked, chunk, self._backend.rendering)
        self._tokens += tokens
        if deltas or tokens:
            piece = Piece(self._choice, tuple(deltas), tuple(tokens), self.intent.index)
            self._stream.push(piece)

    def _make_parser(self) -> AnswerParser | PrefixParser:
        """A whole answer is parsed at its end, a stream in the way its model family allows."""
        opening = self._asked.opening.tolist()
        plain = self._asked.request.conversation.raw is not None
        before = _before(self._prompt, len(opening))
        common: dict[str, Any] = {
            "stop": self._sampling.stop,
            "calls": self._asked.request.options.tool_calls,
            "one_call": not self._asked.request.options.parallel_calls,
            "opening": opening,
            "given_chars": self._begun_chars,
        }
        tools = self._asked.request.conversation.callable_tools
        rendering = self._backend.rendering
        if not plain and not self._streamed:
            return WholeParser(rendering, before, tools, **common)
        if not plain and rendering.markers is None:
            return PrefixParser(rendering, before, tools, **common)
        markers = None if plain else rendering.markers
        return AnswerParser(rendering, before, tools, markers=markers, plain=plain, **common)

    @property
    def _streamed(self) -> bool:
        """Whether the answer is parsed while it is sampled: it is a stream, or the proxy may end it
        before the engine does, or tells its text from the rest token by token."""
        stream = self._asked.request.stream
        return stream or self._ends_early or self._text_tokens is not None

    @property
    def _ends_early(self) -> bool:
        """Whether the proxy may end the answer before the engine does. What is recorded then ends
        with the token that ends the text, however many the engine sent at once."""
        return bool(self._sampling.stop) or not self._asked.request.options.parallel_calls

    @property
    def _begun_chars(self) -> int:
        return _given_chars(self._asked)

    def _without_prefill(self, message: Message) -> Message:
        """The message as the agent gets it, without the agent's own prefill."""
        begun = self._begun_chars
        return structs.replace(message, text=message.text[begun:]) if begun else message

    def _visible(self, deltas: list[Delta]) -> list[Delta]:
        """Leaves out the agent's own prefill, and what the answer before this one said."""
        out: list[Delta] = []
        for delta in deltas:
            if self._continued is not None and isinstance(delta, TextDelta | ReasoningDelta):
                continue
            if self._hidden_chars and isinstance(delta, TextDelta):
                text, size = delta.text, min(self._hidden_chars, len(delta.text))
                self._hidden_chars -= size
                if size == len(text):
                    continue
                delta = TextDelta(text[size:])
            out.append(delta)
        return out

    def _answer_key(self, message: Message) -> Key:
        # Based on the conversation's key, because a forced call is not part of the conversation.
        asked = self._asked.keys[-1]
        if not isinstance(asked, RawKey):
            return asked.answered(message, with_reasoning=self._live.tree.follows)
        raw = self._asked.request.conversation.raw or ""
        return raw_key(raw + message.text if isinstance(raw, str) else [*raw, *self._ids])


async def sample_all(answers: Sequence[LiveAnswer]) -> None:
    """Samples all answers. If one fails, cuts the others, also complete ones, because the agent
    gets none of them, and raises its error."""
    if len(answers) == 1:
        await answers[0].sample()
        return
    tasks = [asyncio.create_task(answer.sample()) for answer in answers]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        if any(end is not None for end in ends):
            for answer in answers:
                answer.cut()


def replayed_answer(
    turn: Turn, prompt: Ids, asked: Asked, rendering: Rendering, choice: int, *, only_calls: bool
) -> tuple[Piece, Outcome]:
    """A recorded answer, in one piece for the watchers and as the agent gets it. `only_calls`: its
    text and reasoning were sent before, with the answer that it continues."""
    message = load_answer(turn.answer) if turn.answer else Message("assistant")
    deltas: list[Delta] = []
    if message.reasoning and not only_calls:
        deltas.append(ReasoningDelta(message.reasoning))
    if message.text and not only_calls:
        deltas.append(TextDelta(message.text))
    send_calls([], message.tool_calls, deltas)
    chunk = _recorded_chunk(turn, asked.request.options.top_logprobs)
    text_tokens = _text_tokens(asked, rendering)
    if text_tokens is None:
        tokens = _shown(asked, chunk, rendering)
    else:
        tokens = [*text_tokens.feed(chunk, deltas), *text_tokens.end()]
    return Piece(choice, tuple(deltas), tuple(tokens), turn.index), Outcome(
        message=message,
        finish_reason=turn.finish_reason or FinishReason.STOP,
        prompt_tokens=turn.prompt_tokens,
        cached_tokens=turn.shared_tokens,
        completion_tokens=len(turn.sampled_ids),
        reasoning_tokens=reasoning_tokens(
            rendering.tokenizer, turn.sampled_ids.tolist(), message.reasoning
        ),
        stop_string=_stop_string(turn, prompt, asked, rendering),
        tokens=tokens,
        turn=turn.index,
        prompt_ids=prompt,
        sampled_ids=turn.sampled_ids,
    )


def _recorded_chunk(turn: Turn, top_logprobs: int) -> Chunk:
    """A recorded answer as an engine gives it, as far as its alternatives are recorded."""
    chunk = Chunk(turn.sampled_ids.tolist(), turn.logprobs.tolist())
    if top_logprobs and turn.alternatives is not None:
        rows = turn.alternatives[:, :top_logprobs].tolist()
        chunk.top_logprobs = [[each for each in row if each[0] >= 0] for row in rows]
    return chunk


def _stop_string(turn: Turn, prompt: Ids, asked: Asked, rendering: Rendering) -> str | None:
    """The stop string that ended a recorded answer, which is not recorded; None: none did."""
    request, opening = asked.request, asked.opening.tolist()
    options, conversation = request.options, request.conversation
    ended = turn.finish_reason is FinishReason.STOP
    if not ended or not options.stop or conversation.raw is not None:
        return None
    parser = WholeParser(
        rendering,
        _before(prompt, len(opening)),
        conversation.callable_tools,
        stop=options.stop,
        calls=options.tool_calls,
        one_call=not options.parallel_calls,
        opening=opening,
        given_chars=_given_chars(asked),
    )
    parser.feed(turn.sampled_ids.tolist())
    parser.finish()
    return parser.stop_string


def _given_chars(asked: Asked) -> int:
    return len((asked.request.conversation.prefill or "").lstrip())


def _before(prompt: Ids, opening_tokens: int) -> Ids:
    """The end of the prompt without the answer's opening."""
    return prompt[-CONTEXT_TOKENS - opening_tokens : -opening_tokens or None]


def _grammar(asked: Asked, prompt: Ids, rendering: Rendering) -> dict[str, Any] | None:
    """What the engine enforces in the answer. A required call is not the final message, which the
    agent's format binds, so it is sampled as without a format. Raises RequestError."""
    options, conversation = asked.request.options, asked.request.conversation
    if options.structured is None or options.forced is not None:
        return None
    if conversation.raw is not None:
        return options.structured
    if conversation.prefill is not None:
        raise RequestError(
            "response_format: a format cannot be enforced in an answer that the request "
            "begins; end with a user message",
            param="response_format",
        )
    tools = conversation.tools if options.tool_calls else []
    return rendering.bound_format(options.structured, prompt[-CONTEXT_TOKENS:], tools)


def _text_tokens(asked: Asked, rendering: Rendering) -> TextTokens | None:
    """What tells the text's tokens from the others, if the agent asks for those."""
    options = asked.request.options
    if not options.logprobs or options.every_token:
        return None
    return TextTokens(rendering.tokenizer)


def _shown(asked: Asked, chunk: Chunk, rendering: Rendering) -> list[SampledToken]:
    """All tokens of the chunk, if the agent asks for log-probabilities."""
    if not asked.request.options.logprobs:
        return []
    decode = rendering.tokenizer.decode
    tops = chunk.top_logprobs or [[] for _ in chunk.ids]
    return [
        SampledToken(
            decode([token]), logprob, tuple((decode([other]), value) for other, value in top)
        )
        for token, logprob, top in zip(chunk.ids, chunk.logprobs, tops, strict=True)
    ]
