"""One answer: sampled, streamed while it is sampled, recorded, and only then whole.

Invariant: what the engine gave is what the turn holds, each id with its log-probability and the
version of the weights that sampled it, also when the answer was cut short.
"""

from __future__ import annotations

import time
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from proxy.conversation import Message, answer_key, dump_answer, load_answer, raw_key
from proxy.engines.protocol import Chunk, Sampling
from proxy.errors import EngineError
from proxy.live_call import LiveCall
from proxy.metrics import Metrics
from proxy.records import FinishReason, Ids, Turn, TurnStatus, VersionSpan
from proxy.rendering.deltas import Delta, ReasoningDelta, TextDelta, tell_calls
from proxy.rendering.prefix_stream import PrefixParser
from proxy.rendering.rendering import CONTEXT_TOKENS, Rendering
from proxy.rendering.stream import AnswerParser
from proxy.routing import Router
from proxy.sessions import LiveSession
from proxy.store.protocol import Store
from proxy.wire.dialect import Call, Outcome, Piece, SampledToken


@dataclass(slots=True)
class Answering:
    """What one answer needs; `run` it once."""

    live: LiveSession
    call: Call
    running: LiveCall
    choice: int
    turn: Turn
    sampling: Sampling
    prompt: Ids
    answered_from: bytes
    """The key that the answer's is chained to: the conversation's, without what was forced."""
    rendering: Rendering
    router: Router
    store: Store
    metrics: Metrics
    _ids: list[int] = field(default_factory=list)
    _logprobs: list[float] = field(default_factory=list)
    _tokens: list[SampledToken] = field(default_factory=list)
    _versions: tuple[VersionSpan, ...] = ()
    _hidden_chars: int = 0
    """Of the text to come: what the agent had begun it with itself."""

    async def run(self) -> Outcome:
        """Raises EngineError when it could not be sampled to its end: the turn is then CUT."""
        parser = self._parser()
        self._hidden_chars = self._begun_chars
        begun = time.perf_counter()
        try:
            finish = await self._sample(parser, begun)
        except BaseException:
            await self._record(parser.finish()[1], FinishReason.CUT, begun)
            raise
        rest, message = parser.finish()
        if finish is FinishReason.STOP and message.tool_calls:
            finish = FinishReason.TOOL_CALLS
        await self._record(message, finish, begun)
        rest = self._visible(rest)
        if rest:
            self.running.push(Piece(self.choice, rest))
        return Outcome(
            message=self._said(message),
            finish_reason=finish,
            prompt_tokens=self.turn.prompt_tokens,
            cached_tokens=self.turn.shared_tokens,
            completion_tokens=len(self._ids),
            stop_string=parser.stop_string,
            tokens=self._tokens,
            turn=self.turn.index,
            prompt_ids=self.prompt,
            sampled_ids=self.turn.sampled_ids,
        )

    async def _sample(self, parser: AnswerParser | PrefixParser, begun: float) -> FinishReason:
        chunks = self.router.generate(
            self.prompt,
            self.sampling,
            request_id=f"{self.turn.session_id}#{self.turn.index}",
            session_id=self.turn.session_id,
            stream=self._streamed,
        )
        async with aclosing(chunks):
            async for chunk in chunks:
                if self.turn.first_token_s is None:
                    self.turn.first_token_s = time.perf_counter() - begun
                self._take(chunk, parser)
                if chunk.finish_reason is FinishReason.CUT:
                    raise EngineError("the engine cut this generation short; try again")
                if chunk.finish_reason is not None:
                    self._versions = chunk.versions
                    return chunk.finish_reason
                if parser.ended:
                    return FinishReason.STOP
        raise EngineError("the engine ended without a finish reason", status=502)

    def _take(self, chunk: Chunk, parser: AnswerParser | PrefixParser) -> None:
        if len(chunk.ids) != len(chunk.logprobs):
            raise EngineError(
                f"the engine sent {len(chunk.ids)} tokens and {len(chunk.logprobs)} "
                "log-probabilities",
                status=502,
            )
        self._ids += chunk.ids
        self._logprobs += chunk.logprobs
        tokens = self._shown(chunk) if self.call.options.logprobs else []
        self._tokens += tokens
        deltas = self._visible(parser.feed(chunk.ids))
        if deltas or tokens:
            self.running.push(Piece(self.choice, deltas, tokens))

    async def _record(self, message: Message, finish: FinishReason, begun: float) -> None:
        turn, size = self.turn, len(self._ids)
        cut = finish is FinishReason.CUT
        turn.sampled_ids = np.array(self._ids, np.int32)
        turn.logprobs = np.array(self._logprobs, np.float32)
        turn.versions = self._versions or _one_version(self.router.version, size)
        turn.finish_reason = finish
        turn.status = TurnStatus.CUT if cut else TurnStatus.DONE
        turn.duration_s = time.perf_counter() - begun
        if size:
            turn.answer = dump_answer(self._said(message))
            turn.answer_key = self._answer_key(message)
        await self.store.commit_turn(turn)
        self.live.tree.commit(turn)
        self.metrics.recorded(turn)
        self.live.publish("turn", index=turn.index, status=turn.status, finish_reason=finish)

    def _parser(self) -> AnswerParser | PrefixParser:
        """Whole answers are read at their end; streams as their family allows."""
        streamed, opening = self._streamed, self.call.opening.tolist()
        plain = self.call.conversation.raw is not None
        before = self.prompt[-CONTEXT_TOKENS - len(opening) : -len(opening) or None]
        common: dict[str, Any] = {
            "stop": self.sampling.stop,
            "calls": self.call.options.tool_calls,
            "one_call": not self.call.options.parallel_calls,
            "opening": opening,
        }
        tools = self.call.conversation.tools
        if streamed and not plain and self.rendering.markers is None:
            return PrefixParser(self.rendering, before, tools, **common)
        markers = self.rendering.markers if streamed else None
        return AnswerParser(self.rendering, before, tools, markers=markers, plain=plain, **common)

    @property
    def _streamed(self) -> bool:
        """Whether the answer is read as it comes: somebody watches, or it may end before the
        engine does."""
        options = self.call.options
        return self.call.stream or bool(self.sampling.stop) or not options.parallel_calls

    @property
    def _begun_chars(self) -> int:
        return len((self.call.conversation.prefill or "").lstrip())

    def _said(self, message: Message) -> Message:
        """What the agent is told of the message; what it began itself is left out."""
        begun = self._begun_chars
        return replace(message, text=message.text[begun:]) if begun else message

    def _visible(self, deltas: list[Delta]) -> list[Delta]:
        """Without the text that the agent had begun the answer with."""
        out: list[Delta] = []
        for delta in deltas:
            if self._hidden_chars and isinstance(delta, TextDelta):
                text, size = delta.text, min(self._hidden_chars, len(delta.text))
                self._hidden_chars -= size
                if size == len(text):
                    continue
                delta = TextDelta(text[size:])
            out.append(delta)
        return out

    def _answer_key(self, message: Message) -> bytes:
        raw = self.call.conversation.raw
        if raw is None:
            follows = self.live.tree.follows
            return answer_key(self.answered_from, message, with_reasoning=follows)
        if isinstance(raw, str):
            return raw_key(raw + message.text)
        return raw_key([*raw, *self._ids])

    def _shown(self, chunk: Chunk) -> list[SampledToken]:
        decode = self.rendering.tokenizer.decode
        tops = chunk.top_logprobs or [[] for _ in chunk.ids]
        return [
            SampledToken(
                decode([token]), logprob, tuple((decode([other]), value) for other, value in top)
            )
            for token, logprob, top in zip(chunk.ids, chunk.logprobs, tops, strict=True)
        ]


async def replayed(running: LiveCall, choice: int, turn: Turn) -> Outcome:
    """A recorded answer, given again."""
    message = load_answer(turn.answer)
    deltas: list[Delta] = [ReasoningDelta(message.reasoning)] if message.reasoning else []
    if message.text:
        deltas.append(TextDelta(message.text))
    tell_calls([], message.tool_calls, deltas)
    running.push(Piece(choice, deltas))
    return Outcome(
        message=message,
        finish_reason=turn.finish_reason or FinishReason.STOP,
        prompt_tokens=turn.prompt_tokens,
        cached_tokens=turn.shared_tokens,
        completion_tokens=len(turn.sampled_ids),
        turn=turn.index,
    )


def _one_version(version: int, size: int) -> tuple[VersionSpan, ...]:
    return (VersionSpan(version, 0, size),) if size else ()
