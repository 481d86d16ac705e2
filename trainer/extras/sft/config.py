"""Section `sft`: which recorded sessions `agentic-train sft` trains on, and how often."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

from pydantic import Field

from agent_loop.outside_parts import OwnFunction
from proxy.extras.export.selection import Filters
from proxy.records import Session, SessionKind, Turn
from proxy.settings.section import Common, Section
from proxy.store.protocol import SessionFilter
from trainer.algorithms.aggregation import AGGREGATIONS, Aggregation, TokenMean


class SessionPredicate(OwnFunction):
    """A function of your own that gets a session and its turns, and returns whether to train on
    it."""

    kind = "where"

    def __call__(self, session: Session, turns: Sequence[Turn]) -> bool:
        return bool(self.called(session, turns))


class SftConfig(Section):
    """Example: SftConfig(sessions=("runs/teacher",), min_reward=1.0, epochs=2)"""

    sessions: Common[tuple[str, ...]] = Field(min_length=1)
    """Where the sessions are recorded, any number of: a folder of `collect`, `eval` or a run; a
    folder that `agentic-proxy export --format records` wrote; the URL of a store
    (`sqlite:///FILE`, `postgresql://…`); or the URL of a running proxy, whose admin key is in
    AGENTIC_PROXY_ADMIN_KEY."""
    kind: Common[Literal["train", "eval", "any"]] = "train"
    """Kind of the sessions. Those of a text-only engine and of evaluations are `eval`; make sure
    that sessions of held-out tasks are not among them."""
    tags: Mapping[str, str] = Field(default_factory=dict)
    """Only sessions whose metadata have these entries, such as `{task_id: sum-17}`."""
    reward: str | None = None
    """Key of the reward that is compared; None: that of the trial."""
    min_reward: Common[float | None] = None
    """Only sessions with at least this reward; None: also sessions without a reward."""
    where: SessionPredicate | None = None
    """A function of your own that chooses sessions: `module:function` or `file.py:function`."""
    ids: Literal["auto", "rendered"] = "auto"
    """`auto`: train recorded token ids where the model's own renderer reads and writes them as
    recorded, and render the text of other sessions. `rendered`: render the text of all sessions."""
    without_reasoning: Literal["as_last", "as_history"] = "as_last"
    """How a rendered answer without reasoning is written. `as_last`: as the chat template writes
    the last answer, which for Qwen3 begins with an empty `<think>` block. `as_history`: as it
    writes earlier answers, for a model that does not know such blocks."""
    epochs: Common[int] = Field(1, ge=1)
    """Number of passes over the sessions. `trainer.steps` has no effect."""
    batch_sessions: int = Field(16, ge=1)
    """Number of sessions per optimizer step."""
    aggregation: Annotated[Aggregation, AGGREGATIONS] = TokenMean()
    """How the losses of tokens become the loss of a step; `rollout_mean`: every session weighs the
    same."""
    held_out: Common[float] = Field(0.0, ge=0, lt=1)
    """Share of the tasks whose sessions are not trained on; their loss is the held-out loss."""
    held_out_every: int = Field(10, ge=0)
    """Number of steps between held-out losses; 0: only before the first step and at the end."""

    @property
    def filters(self) -> Filters:
        """The filters, as `agentic-proxy export` takes them."""
        kind = None if self.kind == "any" else SessionKind(self.kind)
        return Filters(
            SessionFilter(kind=kind),
            tags=self.tags,
            reward_key=self.reward,
            min_reward=-math.inf if self.min_reward is None else self.min_reward,
            predicate=self.where,
        )
