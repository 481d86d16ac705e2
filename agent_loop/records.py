"""The records of the agent loop, in the order in which the data meets them.

`Task` → `Trial` → `AgentResult` → `FinishedTrial` → `Graded` → `Segment` → `Trajectory` →
`Rollout` → `Group`. Invariant: a sampled token has `mask` True in exactly one segment, and in
exactly one of a rollout's trajectories, however many paths run through it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from agent_loop.kept_tokens import KeptTokens
from proxy.records import Ids, ImageSpan, Logprobs, Session, Turn
from proxy.records.expert_rows import Routing
from proxy.wall import Wall

if TYPE_CHECKING:
    from proxy.client import ProxyClient

Mask = npt.NDArray[np.bool_]

REWARD_ROUNDING = 1e-6
UNSAMPLED = -1
"""The version of a token that no weights have sampled."""
"""Rewards that differ by no more than this share of the largest one count as equal: the sum of a
few float32 values has a relative error of about 1e-7, and a meaningful difference is larger."""


@dataclass(frozen=True, slots=True)
class Task:
    """What an agent is asked to do.

    Example: Task(task_id="sum-17", source="arithmetic", data={"prompt": "…", "answer": "42"})
    """

    task_id: str
    data: Mapping[str, Any]
    source: str = "default"
    agent: str = ""
    """Name of the agent that tries it; empty in a run with one agent."""

    @property
    def prompt(self) -> str:
        """The task's `prompt`, `instruction` or `question`; empty if it has none of them."""
        for name in ("prompt", "instruction", "question"):
            if isinstance(value := self.data.get(name), str):
                return value
        return ""


SEEN = ".trial"
"""Name of each trial's directory, as its programs see it."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One attempt at a task, with a session and a directory of its own.

    Example: Trial(trial_id="sum-17-9fJq", task=Task(…), base_url="http://127.0.0.1:8080/v1",
                   api_key="sk-…", model="policy", directory=Path("run/trials/sum-17-9fJq"),
                   timeout_s=300.0, seed=7)
    """

    trial_id: str
    task: Task
    base_url: str
    """URL of the session, with `/v1`, as OpenAI's SDKs expect it."""
    api_key: str
    model: str
    """The model name that the agent is given."""
    directory: Path
    """The trial's directory. It exists and is empty before the launcher runs; logs stay in it. A
    local agent sees its `workspace`, its `agent_directory` and its `task_file` alone, so that no
    file that is written here afterwards can be a link that the agent made."""
    timeout_s: float
    """Seconds that the agent may run."""
    seed: int = 0
    wall: Wall | None = None
    """What is hidden from a local agent's processes; None: nothing. The parts of the trial's
    directory that are the agent's stay visible."""
    hidden_fields: frozenset[str] = frozenset()
    """Fields of the task's data that rewards see and the agent does not."""

    @property
    def agent_data(self) -> dict[str, Any]:
        """The task's data as the agent gets it."""
        data = self.task.data
        return {name: value for name, value in data.items() if name not in self.hidden_fields}

    @property
    def workspace(self) -> Path:
        """The agent's working directory."""
        return self.directory / "work"

    @property
    def visible(self) -> tuple[Path, ...]:
        """What of the trial's directory its agent sees."""
        return self.workspace, self.agent_directory, self.task_file

    @property
    def home(self) -> Path:
        """What an agent behind a wall sees as the user's home folder."""
        return self.directory / "home"

    @property
    def began_with(self) -> Path:
        """The files that configured tools when the agent began (`launchers/left_files.py`)."""
        return self.directory / "began"

    @property
    def temporary(self) -> Path:
        """What an agent behind a wall sees as `/tmp`."""
        return self.directory / "tmp"

    @property
    def agent_directory(self) -> Path:
        """A directory for the agent's own files, such as its settings and its transcript."""
        return self.directory / "agent"

    @property
    def seen_at(self) -> tuple[Path, Path] | None:
        """The trial's directory, and the path at which its programs see it: the same one in every
        trial, so that prompts that name it begin alike. None: they see it at its own path, because
        no wall hides those of other trials."""
        folder = self.directory.resolve().parent
        hidden = () if self.wall is None else self.wall.hide
        if not any(folder.is_relative_to(Path(path).resolve()) for path in hidden):
            return None
        return self.directory, self.directory.absolute().parent / SEEN

    @property
    def task_file(self) -> Path:
        """The agent's view of the task's data, as JSON."""
        return self.directory / "task.json"


class AgentEnd(StrEnum):
    """How an agent ended."""

    EXITED = "exited"
    """The agent ended by itself, with success."""
    CRASHED = "crashed"
    """The agent ended by itself, with an error (an exit code other than 0, an exception)."""
    TIMED_OUT = "timed_out"
    """The agent was ended at its deadline. Its work may still be verified."""


@dataclass(frozen=True, slots=True)
class AgentResult:
    """What a launcher knows when the agent has ended.

    Example: AgentResult(AgentEnd.CRASHED, error="exit code 2", wall_s=1.4)
    """

    end: AgentEnd
    error: str | None = None
    """One line on what went wrong; None if `end` is EXITED."""
    wall_s: float = 0.0
    reward: float | None = None
    """The reward that the launcher knows (such as a function's return value); None: no reward."""
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class FinishedTrial:
    """A trial whose agent has ended and whose session is completed: the input of a reward
    source."""

    trial: Trial
    agent: AgentResult
    session: Session
    turns: Sequence[Turn]
    proxy: ProxyClient | None = None
    """The control plane of the proxy that recorded it; None: no proxy of the policy did."""


@dataclass(frozen=True, slots=True)
class Graded:
    """A reward source's answer. Example: Graded(1.0, parts={"reward": 1.0, "style": 0.5})"""

    value: float | None
    """The reward to train with; None: this source gives no reward."""
    parts: Mapping[str, float] = field(default_factory=dict)


NO_REWARD = Graded(None)


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens of a session's tree between two forks; a path from a root to a leaf is a trajectory.

    Example: a session that forked once after 350 tokens has three segments:
        Segment(parent=-1, ids=[350]), Segment(parent=0, …), Segment(parent=0, …)
    """

    parent: int
    """Index of the segment before this one in the rollout's `segments`; -1 for a root."""
    ids: Ids
    """`[T]`, token ids; below 0 for tokens of `images`."""
    mask: Mask
    """`[T]`, True where the policy sampled the token and it is to be trained."""
    logprobs: Logprobs
    """`[T]`, as recorded at sampling; 0 where `mask` is False."""
    versions: Ids
    """`[T]`, the version of the weights that sampled the token; -1 where `mask` is False."""
    turns: Ids
    """`[T]`, index of the turn that the token belongs to (its prompt or its answer)."""
    routing: Routing | None = None
    """The experts that the engine's router chose for the tokens; None: not recorded."""
    kept: KeptTokens | None = None
    """`[T, K]`, the tokens that top-k and top-p left; None: all were sampled from the whole
    vocabulary."""
    images: tuple[ImageSpan, ...] = ()
    """The images in `ids`, whose tokens have ids below 0 (`proxy.records.images`)."""

    def training_only(self, chosen: Mask) -> Segment:
        """The segment, of whose trained tokens only those that are `chosen` (`[T]`) are trained."""
        keep = self.mask & chosen
        return replace(
            self,
            mask=keep,
            logprobs=np.where(keep, self.logprobs, np.float32(0)),
            versions=np.where(keep, self.versions, np.int32(-1)),
        )


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One path through the tree as one training sequence; arrays as in `Segment`, all `[T]`.

    Example: ids=[p p p s s p s], mask=[0 0 0 1 1 0 1], turns=[0 0 0 0 0 1 1]
    """

    ids: Ids
    mask: Mask
    logprobs: Logprobs
    versions: Ids
    turns: Ids
    routing: Routing | None = None
    kept: KeptTokens | None = None
    images: tuple[ImageSpan, ...] = ()

    @property
    def sampled_from_all(self) -> Mask:
        """`[T]`, of the trained tokens those that were sampled from the whole vocabulary: the ones
        that a trainer can train which does not know `kept`."""
        return self.mask if self.kept is None else self.mask & (self.kept < 0).all(1)

    def __len__(self) -> int:
        return len(self.ids)


CALL_CHARS = 500
"""Characters that a `Rollout` keeps of a tool call."""


class RolloutStatus(StrEnum):
    """How a trial ended."""

    DONE = "done"
    """The agent ended by itself, with success."""
    TRUNCATED = "truncated"
    """A limit ended the trial (the agent's time, the length of an answer). A verifier's reward
    counts."""
    FAILED = "failed"
    """The trainer's side, the verifier or the sandbox failed: excluded from training and
    counted."""
    ABORTED = "aborted"
    """The trainer ended the trial: a straggler, a stop rule, Ctrl-C."""


@dataclass(frozen=True, slots=True)
class Rollout:
    """A trial with its rewards and its tree. `trial/outcome.py` builds it completely, in one place.

    Example: Rollout(trial_id="sum-17-9fJq", task=Task(…), status=RolloutStatus.DONE,
                     reward=1.0, segments=(Segment(…),), turn_returns={0: 1.0, 1: 1.0})
    """

    trial_id: str
    task: Task
    status: RolloutStatus
    reward: float | None
    """The reward to train with. None is *no reward*: it is not 0, and is never trained."""
    segments: tuple[Segment, ...] = ()
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    turn_returns: Mapping[int, float] = field(default_factory=dict)
    """Turn index → the return credited to the turn, after discounts, rewards of turns and branches,
    and the credit policy for side calls; the return of a turn that is not listed is `reward`."""
    turn_shares: Mapping[int, float] = field(default_factory=dict)
    """Turn index → the share of the trial's reward in the turn's return: `discount ** distance` in
    a chain without forks, and 1 for a turn that is not listed. Baselines are multiplied by this
    share."""
    reward_of_turns: float = 0.0
    """The part of `reward` that is the sum of rewards of single turns, each of which is in the
    return of its own turn alone; 0 if the trial has a reward of its own."""
    turn_policies: Mapping[int, str] = field(default_factory=dict)
    """Turn index → the policy that sampled it, for the turns of a run that trains several; empty:
    one policy sampled all trained tokens."""
    turn_calls: Mapping[int, str] = field(default_factory=dict)
    """Turn index → the tool calls of its answer, a line `NAME ARGUMENTS` each, of which at most
    CALL_CHARS characters are kept; a turn without a call is not listed."""
    truncated_turns: tuple[int, ...] = ()
    """Indices of the turns whose answer ended with `finish_reason` length."""
    num_turns: int = 0
    """Number of answered turns."""
    forks: Mapping[str, int] = field(default_factory=dict)
    """Cause of a fork → number of forks."""
    started_version: int = 0
    """The policy's version when the trial was started."""
    error: str | None = None
    """One line on why `status` is not DONE; None if it is DONE."""
    started_at: float = 0.0
    """When the trial began, in Unix seconds; 0: not known."""
    times_s: Mapping[str, float] = field(default_factory=dict)
    """Phase → seconds spent in it: `total`, `opening` (until the agent starts), `agent`,
    `generate` (the model's part of `agent`), `verifier` (which ends with the trial)."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    logs: str | None = None
    """Folder with the agent's output."""
    seed: int = 0
    stale_turns: Mapping[int, int] = field(default_factory=dict)
    """Turn index → number of its sampled tokens that are too old to be trained, and are context
    now. Their turns are still compared with those of the other rollouts."""
    prefix: str = ""
    """The recorded turns with which it began and which it does not train, as `SESSION@TURNS`.
    Rollouts of a group share a baseline only if they have the same prefix; empty: none."""
    pictures: Mapping[str, bytes] = field(default_factory=dict)
    """The bytes of the images in `segments` by their sha256, as the agent sent them."""

    @property
    def trainable(self) -> bool:
        """Whether it has a reward and a token to train."""
        return self._is_judged and any(segment.mask.any() for segment in self.segments)

    @property
    def compared(self) -> bool:
        """Whether it counts for the baseline of its group: it has a reward, and a token to train or
        one that is only too old for it."""
        return self.trainable or (self._is_judged and bool(self.stale_turns))

    @property
    def _is_judged(self) -> bool:
        ended = self.status in (RolloutStatus.DONE, RolloutStatus.TRUNCATED)
        return ended and self.reward is not None

    @property
    def sampled_tokens(self) -> int:
        """Number of tokens to train."""
        return int(sum(segment.mask.sum() for segment in self.segments))

    @property
    def oldest_version(self) -> int:
        """Version of the oldest weights that sampled a trained token; `started_version` if there
        is no such token."""
        oldest = [int(s.versions[s.mask].min()) for s in self.segments if s.mask.any()]
        return min(oldest, default=self.started_version)

    @property
    def newest_version(self) -> int:
        """Version of the newest weights that sampled a trained token; `started_version` if there
        is no such token."""
        newest = [int(s.versions[s.mask].max()) for s in self.segments if s.mask.any()]
        return max(newest, default=self.started_version)


@dataclass(frozen=True, slots=True)
class Group:
    """The rollouts of one task that share a baseline: all of them, or those with one prefix.

    Example: Group("g17", Task("sum-17", …), (Rollout(…), Rollout(…)))
    """

    group_id: str
    task: Task
    rollouts: Sequence[Rollout]

    @property
    def uniform(self) -> bool:
        """Whether the rewards of the trainable rollouts that share a baseline are equal, up to
        rounding, and those of their turns, too: of the rollouts with one prefix, and of a rollout
        and all that branch from it, which `algorithm.advantage=tree` compares."""
        trained = [rollout for rollout in self.rollouts if rollout.trainable]
        by_trial = {rollout.trial_id: rollout for rollout in trained}
        compared: dict[str, list[Rollout]] = {}
        for rollout in trained:
            root = rollout
            while root.prefix and (trunk := by_trial.get(root.prefix.rpartition("@")[0])):
                root = trunk
            compared.setdefault(root.prefix, []).append(rollout)
        return all(map(_are_alike, compared.values()))

    @property
    def oldest_version(self) -> int:
        """The oldest version of the trainable rollouts, or of all rollouts if none is trainable."""
        counted = [r for r in self.rollouts if r.trainable] or self.rollouts
        return min((r.oldest_version for r in counted), default=0)


def _are_alike(rollouts: Sequence[Rollout]) -> bool:
    """Whether their rewards are equal, and those of the turns that are as far from the end."""
    if not _are_equal([rollout.reward or 0.0 for rollout in rollouts]):
        return False
    turns = zip_longest(*map(_own_rewards, rollouts))
    return all(_are_equal([own for own in place if own is not None]) for place in turns)


def _own_rewards(rollout: Rollout) -> Iterator[float]:
    """What each credited turn has in addition to its share of the trial's reward, from the last
    turn on."""
    of_trial = (rollout.reward or 0.0) - rollout.reward_of_turns
    for turn in sorted(rollout.turn_returns, reverse=True):
        credited, shared = rollout.turn_returns[turn], rollout.turn_shares.get(turn, 1.0) * of_trial
        yield 0.0 if _are_equal([credited, shared]) else credited - shared


def _are_equal(rewards: Sequence[float]) -> bool:
    return max(rewards) - min(rewards) <= REWARD_ROUNDING * max(map(abs, rewards))
