"""Retries: decides how to answer a request that repeats an earlier one.

    an earlier, equal request is ...                     the new request ...
    running, and the new one is marked as a retry,
      or no agent waits for the running one any more     joins it (`joins`)
    answered, but the answer did not arrive              gets that answer replayed (`Replay`)
    answered, and the new one is a retry                 gets it replayed once
    answered in part, and no answer arrived              is sampled, and supersedes that part
    cut, and the new one is a retry or in another form   is sampled and supersedes nothing
    answered, and the new one came after the answer, in
      another form (stream or not) or with a larger
      max_tokens, or is a second retry                   is sampled, and supersedes the answer
    anything else                                        is sampled as a sibling

"In part" means that fewer of the `n` answers are recorded than the new request wants: recording one
of them failed. "Answered" means that the turn is DONE and no later turn continues it, except for a
required call (`forced_call`) that none continues. A request can only repeat what was sent before it
arrived: two concurrent requests never supersede each other, however they differ. Invariant: a
superseded answer is never trained, and an answer that an agent may still continue is never
superseded by a request that was sent before the answer arrived.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

import msgspec

from proxy.records import TurnStatus
from proxy.serving.asked import Asked
from proxy.serving.forced_call import calls_after
from proxy.token_tree.tree import Node, TokenTree
from proxy.wire.dialect import Outcome


class Replay(msgspec.Struct, frozen=True):
    """The recorded answers of these turns are replayed."""

    indexes: tuple[int, ...]


class Resample(msgspec.Struct, frozen=True):
    """New turns are sampled. The agent rejected the answers of the turns in `supersedes`."""

    supersedes: tuple[int, ...] = ()


class EndedCall(msgspec.Struct, frozen=True):
    """A call of this process that has ended: its turns, its form, and when the agent had it."""

    turns: tuple[int, ...]
    streamed: bool
    settled_at: float
    """`time.monotonic()`."""


@dataclass(slots=True)
class RetryBook:
    """What a session remembers about its calls in order to answer their retries."""

    lost: set[int] = field(default_factory=set)
    """Answered turns whose answer is known not to have arrived."""
    ended: dict[int, EndedCall] = field(default_factory=dict)
    """By turn; turns that another process began have none."""
    continued: dict[int, list[int]] = field(default_factory=dict)
    """By turn: those that continue its answer in the same call (`provider_tools`)."""
    repeated: set[int] = field(default_factory=set)
    """Turns that were repeated already: cut ones, and arrived ones replayed to a retry."""

    def settle(self, turns: Iterable[int], *, streamed: bool, arrived: bool) -> None:
        """Records that a call has ended, and whether its answers arrived."""
        indexes = tuple(turns)
        attempt = EndedCall(indexes, streamed, time.monotonic())
        for index in indexes:
            self.ended[index] = attempt
            if arrived:
                self.lost.discard(index)
            else:
                self.lost.add(index)

    def decide(
        self, tree: TokenTree, same: list[Node], sending: AbstractSet[int], asked: Asked
    ) -> Replay | Resample:
        """Decides how the request is answered, and remembers it. Call it while placing.

        `same` are the turns of equal requests, of which there is at least one.
        `sending` are the turns whose answers are on their way, which no agent can have rejected.
        """
        open_ended = self._open_ended(tree, same, asked)
        settled = [node for node in open_ended if node.index not in sending]
        lost = self._lost(open_ended, asked)
        if lost:
            self.lost.difference_update(lost)
            return Replay(lost)
        never_arrived = {node.index for node in settled if node.index in self.lost}
        cut = self._repeated_cut_call(same, asked)
        if cut:
            self.repeated.update(cut)
            return Resample(_with_calls(tree, never_arrived, asked))
        again = self._for_a_retry(open_ended, asked)
        if again:
            self.repeated.update(again)
            return Replay(again)
        rejected = never_arrived | self._rejected(tree, settled, asked)
        return Resample(_with_calls(tree, rejected, asked))

    def required_call(self, tree: TokenTree, asked: Asked, said: Outcome) -> Replay | None:
        """The recorded turn that continues the recorded answer `said` with the required call."""
        calls = calls_after(said.turn, asked, tree)
        found = tuple(n.index for n in calls if n.status is TurnStatus.DONE and not n.children)[-1:]
        self.lost.difference_update(found)
        return Replay(found) if found else None

    def has(self, tree: TokenTree, same: list[Node], asked: Asked) -> bool:
        """Whether `decide` would replay recorded answers."""
        open_ended = self._open_ended(tree, same, asked)
        if self._lost(open_ended, asked):
            return True
        cut = self._repeated_cut_call(same, asked)
        return not cut and bool(self._for_a_retry(open_ended, asked))

    def _lost(self, open_ended: list[Node], asked: Asked) -> tuple[int, ...]:
        """The latest answers that did not arrive; none if they are fewer than the request wants."""
        lost = [node.index for node in open_ended if node.index in self.lost][-asked.request.n :]
        return tuple(lost) if len(lost) == asked.request.n else ()

    def _repeated_cut_call(self, same: list[Node], asked: Asked) -> tuple[int, ...]:
        """The turns of the latest cut call that this request repeats, if none did before."""
        for node in reversed(same):
            if node.status is not TurnStatus.CUT or node.index in self.repeated:
                continue
            attempt = self.ended.get(node.index)
            if asked.caller.is_retry or in_another_form(attempt, asked):
                return attempt.turns if attempt else (node.index,)
        return ()

    def _for_a_retry(self, answered: list[Node], asked: Asked) -> tuple[int, ...]:
        """The latest answers, if they were not replayed to a retry in this form before. They may
        still be on their way to the agent, which no longer waits for them."""
        if not asked.caller.is_retry:
            return ()
        latest = [node.index for node in answered][-asked.request.n :]
        new = self.repeated.isdisjoint(latest) and not any(
            in_another_form(self.ended.get(index), asked) for index in latest
        )
        return tuple(latest) if new and len(latest) == asked.request.n else ()

    def _open_ended(self, tree: TokenTree, same: list[Node], asked: Asked) -> list[Node]:
        return [
            n
            for n in same
            if n.status is TurnStatus.DONE and not self._is_continued(tree, n, asked)
        ]

    def _is_continued(self, tree: TokenTree, node: Node, asked: Asked) -> bool:
        """Whether a request continues the answer, or what the call itself began after it: a
        required call, or what follows a result."""
        own = self.continued.get(node.index)
        if own is not None:
            after = [tree.nodes[index] for index in own]
            direct = sum(n.parent == node.index for n in after)
            return node.children > direct or any(self._is_continued(tree, n, asked) for n in after)
        calls = calls_after(node.index, asked, tree)
        of_the_answer = sum(call.shared_tokens > node.prompt_tokens for call in calls)
        return node.children > of_the_answer or any(call.children for call in calls)

    def _rejected(self, tree: TokenTree, arrived: list[Node], asked: Asked) -> set[int]:
        """The answers that the agent had and rejected."""
        room = asked.request.options.max_tokens
        before = [node for node in arrived if self._arrived_before(node.index, asked)]
        found = {n.index for n in before if room is not None and _ends_at(tree, n, asked) < room}
        if before:
            latest = before[-1].index
            attempt = self.ended.get(latest)
            if asked.caller.is_retry or in_another_form(attempt, asked):
                own = attempt.turns if attempt else (latest,)
                found.update(node.index for node in before if node.index in own)
        return found

    def _arrived_before(self, index: int, asked: Asked) -> bool:
        attempt = self.ended.get(index)
        return attempt is None or attempt.settled_at < asked.caller.arrived_at


def joins(asked: Asked, running: Asked, *, is_awaited: bool) -> bool:
    """Whether a request joins the running call of an equal one: it is marked as a retry, or no
    agent waits for that call (`is_awaited`) any more; and the call gives what it asks for."""
    return _parts(asked) == _parts(running) and (asked.caller.is_retry or not is_awaited)


def _with_calls(tree: TokenTree, answers: AbstractSet[int], asked: Asked) -> tuple[int, ...]:
    """The answers, and the required calls that continue them."""
    calls = [call for index in answers for call in calls_after(index, asked, tree)]
    return tuple(sorted({*answers, *(c.index for c in calls if c.status is TurnStatus.DONE)}))


def _parts(asked: Asked) -> tuple[int, bool, int]:
    """What decides the parts of an answer, besides the conversation."""
    request, options = asked.request, asked.request.options
    return request.n, options.logprobs, options.top_logprobs


def _ends_at(tree: TokenTree, node: Node, asked: Asked) -> float:
    """The `max_tokens` at which the answer, or the required call after it, was truncated; infinite
    if it was not."""
    calls = [call for call in calls_after(node.index, asked, tree) if call.truncated_at is not None]
    if calls:
        return len(node.sampled_ids) + (calls[-1].truncated_at or 0)
    return math.inf if node.truncated_at is None else node.truncated_at


def in_another_form(attempt: EndedCall | None, asked: Asked) -> bool:
    """Whether the ended call was a stream and the request is not, or the other way round."""
    return attempt is not None and attempt.streamed != asked.request.stream
