"""A branch while it is served: which of its calls are answered from the recording.

    the request is ...                                   it is ...
    that of a recorded turn whose answer has not yet     answered with it (`Replay`)
      reached the agent
    that of a turn whose answer has, and it is a retry   answered with it again
      or has another form (stream or not)
    any other request of a recorded turn                 sampled, as a sibling
    another one than the recorded one at its place       diverged: refused, or sampled as a fork
    anything else                                        sampled

A request is at the place of a recorded turn if both continue the same recorded answer, or both
begin a conversation, and the turn has not been replayed yet. Parallel conversations need not be in
the order of the recording: a request that the other session recorded after the branch's last
recorded turn has not diverged. Invariant: a recorded turn is never sampled again in its place,
superseded, or changed.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict
from typing import Any

from proxy.branching.divergence import RequestDifference
from proxy.branching.prefix import Recognised, RecordedPrefix
from proxy.branching.tolerance import Tolerance
from proxy.conversation.messages import Conversation, Message
from proxy.errors import Diverged
from proxy.metrics import Metrics
from proxy.records import FOLDER, BranchMode, Origin, Session, Turn, TurnStatus
from proxy.rendering.rendering import Rendering
from proxy.serving.asked import Asked
from proxy.serving.forced_call import place_call
from proxy.serving.retries import Replay, RetryBook, in_another_form
from proxy.settings.profiles import AgentProfile
from proxy.store.protocol import Store, Undelivered
from proxy.token_tree.tree import Node, TokenTree
from proxy.wire.dialect import Outcome

ANSWERED = (TurnStatus.DONE, TurnStatus.CONTEXT)


class LiveBranch:
    """The recorded turns of a branch, and which of them are still to be replayed."""

    def __init__(
        self, store: Store, origin: Origin, prefix: RecordedPrefix, tolerance: Tolerance
    ) -> None:
        self.origin = origin
        self._store = store
        self.pending: set[int] = set()
        """Recorded answers that have not been sent to the agent."""
        self._stopped: str | None = None
        """Why a strict branch refuses every call."""
        self._prefix = prefix
        self._tolerance = tolerance

    def read(self, turns: Sequence[Turn], undelivered: Undelivered, own: set[int]) -> None:
        """Updates `pending`; `own`: turns whose answers this process is sending."""
        recorded = turns[: self.origin.turn]
        answered = {turn.index for turn in recorded if turn.status in ANSWERED}
        self.pending = answered - undelivered.replayed - own

    def recognise(self, conversation: Conversation) -> Recognised:
        """Puts recorded messages in the place of the request's own, and for a request that was
        not recorded the branch's system message."""
        found = self._prefix.recognise(conversation)
        conversation.messages = list(found.conversation.messages)
        conversation.tools = found.conversation.tools
        if self.origin.system is not None and not found.complete:
            _set_system(conversation, self.origin.system)
        return found

    def recorded(self, tree: TokenTree, asked: Asked) -> list[Node]:
        """The recorded turns that have this request."""
        same = tree.same_requests(asked.request_key)
        return [node for node in same if node.index < self.origin.turn]

    def replays(self, tree: TokenTree, retries: RetryBook, asked: Asked) -> bool:
        """Whether the request gets recorded answers, for which nothing is sampled."""
        recorded = bool(self.recorded(tree, asked))
        return recorded and isinstance(self.decide(tree, retries, asked), Replay)

    async def open(
        self,
        tree: TokenTree,
        retries: RetryBook,
        asked: Asked,
        metrics: Metrics,
        record: Callable[[str, dict[str, Any]], Awaitable[None]],
    ) -> Replay | RequestDifference | None:
        """How a call begins; None and a divergence (of a live branch): its answer is sampled.

        What was tolerated or has diverged is counted, and recorded as an event by `record`, which
        gets its kind and its data. Raises Diverged if the branch is strict."""
        mode = self.origin.mode
        if self._stopped is not None:
            raise Diverged(self._stopped)
        decision = self.decide(tree, retries, asked)
        if isinstance(decision, Replay):
            tolerated = asked.recognised.tolerated if asked.recognised else []
            if tolerated:
                differences = [asdict(difference) for difference in tolerated]
                turn = decision.indexes[0]
                await record("tolerated", {"turn": turn, "differences": differences})
            self._taken(retries, decision.indexes)
            metrics.replayed(len(decision.indexes), tolerated=bool(tolerated))
        elif decision is not None:
            if await self._was_recorded_later(asked):
                return None
            metrics.diverged(mode)
            await record("diverged", {"mode": mode, **asdict(decision)})
            if mode is BranchMode.STRICT:
                parent = self.origin.session_id
                self._stopped = f"this branch of {parent!r} has stopped: {decision.text}"
                raise Diverged(self._stopped)
        return decision

    def required_call(
        self,
        tree: TokenTree,
        retries: RetryBook,
        asked: Asked,
        said: Outcome,
        rendering: Rendering,
    ) -> Replay | None:
        """The recorded turn that continues the recorded answer `said` with the required call."""
        if said.turn >= self.origin.turn:
            return retries.required_call(tree, asked, said)
        continued, _ = place_call(asked, said, tree, rendering)
        found = tuple(node.index for node in self.recorded(tree, continued))[-1:]
        self._taken(retries, found)
        return Replay(found) if found else None

    def decide(
        self, tree: TokenTree, retries: RetryBook, asked: Asked
    ) -> Replay | RequestDifference | None:
        """None: the answer is sampled. Changes nothing; see `_taken`."""
        same, count = self.recorded(tree, asked), asked.request.n
        answered = [node for node in same if node.status in ANSWERED]
        waiting = [n for n in answered if n.index in self.pending or n.index in retries.lost]
        # An answer that the recorded agent did not receive comes after the one that it continued.
        waiting.sort(key=lambda node: (not node.children, node.index))
        if len(waiting) >= count:
            return Replay(tuple(sorted(node.index for node in waiting[:count])))
        latest = tuple(node.index for node in answered[-count:])
        if len(latest) == count and (
            asked.caller.is_retry or in_another_form(retries.ended.get(latest[-1]), asked)
        ):
            return Replay(latest)
        return None if same else self._divergence(tree, asked)

    def given_answer(self, index: int) -> str | None:
        """The text that answers turn `index` instead of the engine."""
        return self.origin.answer if index == self.origin.turn else None

    def _taken(self, retries: RetryBook, indexes: Sequence[int]) -> None:
        """To be called when the answers of these turns are about to be sent."""
        self.pending.difference_update(indexes)
        retries.lost.difference_update(indexes)

    async def _was_recorded_later(self, asked: Asked) -> bool:
        """Whether the origin recorded this request after the turns of the branch."""
        assert asked.recognised is not None
        turns = await self._store.get_turns(self.origin.session_id)
        with_reasoning = self._prefix.with_reasoning
        later = await asyncio.to_thread(
            lambda: RecordedPrefix(turns, self._tolerance, with_reasoning=with_reasoning)
        )
        return later.recognise(asked.recognised.conversation).complete

    def _divergence(self, tree: TokenTree, asked: Asked) -> RequestDifference | None:
        recognised, node = asked.recognised, tree.match(asked.keys).node
        if recognised is None or (node is not None and node >= self.origin.turn):
            return None
        after = self._prefix.after
        expected = [i for i in sorted(self.pending) if after(i) == recognised.answered]
        if not expected:
            return None
        turn = recognised.turn if recognised.turn in expected else expected[0]
        assert turn is not None
        return self._prefix.divergence(turn, recognised.conversation)


async def open_branch(
    store: Store, session: Session, origin: Origin, turns: Sequence[Turn], profile: AgentProfile
) -> LiveBranch:
    """The branch with its recorded turns, of which `read` then sets the pending ones."""
    recorded = turns[: origin.turn]
    ids = {session.session_id, origin.session_id, *(turn.session_id for turn in recorded)}
    found = [session, *[await store.get_session(i) for i in ids - {session.session_id}]]
    folders = [str(s.metadata[FOLDER]) for s in found if s is not None and FOLDER in s.metadata]
    dashed = [re.sub(r"[^0-9A-Za-z]", "-", folder) for folder in folders]  # as Claude Code names it
    tolerance = Tolerance(profile, {"session": sorted(ids), "folder": [*folders, *dashed]})
    prefix = await asyncio.to_thread(
        lambda: RecordedPrefix(recorded, tolerance, with_reasoning=profile.follows)
    )
    return LiveBranch(store, origin, prefix, tolerance)


def _set_system(conversation: Conversation, text: str) -> None:
    """Replaces the system messages before the first message of another role."""
    messages = conversation.messages
    rest = next((at for at, m in enumerate(messages) if m.role != "system"), len(messages))
    conversation.messages = [Message("system", text), *messages[rest:]]
