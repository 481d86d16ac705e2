"""The types of what the page is sent; `/openapi.json` has their schemas.

The handlers build their answers as these types, so that the document cannot differ from them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NotRequired

from pydantic import with_config
from typing_extensions import TypedDict  # pydantic has no schema for Python 3.11's own

from proxy.engines.protocol import EngineInfo
from proxy.extras.rules.rules import RuleJson
from proxy.extras.rules.watch import RuleFault
from proxy.extras.view.run_answers import RunStamps
from proxy.http.valid_json import CLOSED, OPEN
from proxy.records import FinishReason, ForkCause, SessionKind, SessionStatus, TurnStatus
from proxy.records.binary import MarkFields, RewardFields
from proxy.search.terms import HitJson


@with_config(CLOSED)
class Secret(TypedDict):
    """Body of `POST /view/log_in`: the secret of a link, a key, or the admin key."""

    secret: str


@with_config(CLOSED)
class BranchPoint(TypedDict):
    """Where a branch begins."""

    session: str
    turn: int


@with_config(CLOSED)
class RatingJson(TypedDict):
    """What a person said of a session last."""

    value: float | None
    comment: str


@with_config(CLOSED)
class RefusalJson(TypedDict):
    """A call that was answered with an error."""

    status: int
    message: str


@with_config(CLOSED)
class SessionJson(TypedDict):
    """A session with numbers about its turns. Times are in Unix seconds."""

    id: str
    kind: SessionKind
    status: SessionStatus
    created_at: float
    completed_at: float | None
    profile: str
    metadata: dict[str, Any]
    origin: BranchPoint | None
    reward: float | None
    """`Session.reward`."""
    marks: list[MarkFields]
    rewards: list[RewardFields]
    turns: int
    running: int
    cut: int
    sampled_tokens: int
    longest_path: int
    last_at: float | None
    forks: dict[str, int]
    asked: str
    """The first words of the user; empty if none are recorded."""
    rating: RatingJson | None
    refused: RefusalJson | None
    """The last call that was refused."""


@with_config(CLOSED)
class SessionsPage(TypedDict):
    """Answer of `GET /view/sessions`."""

    sessions: list[SessionJson]
    next: str | None
    """The parameter `before` of the next page."""


@with_config(CLOSED)
class HeadJson(TypedDict):
    """A turn without its tokens and texts."""

    session: str
    index: int
    parent: int | None
    after: int | None
    same_as: int | None
    fork: ForkCause | None
    status: TurnStatus
    finish: FinishReason | None
    dialect: str
    agent: str | None
    shared: int
    new: int
    sampled: int
    versions: list[tuple[int, int, int]]
    """`(version, start, end)` of the sampled tokens `[start, end)`."""
    started_at: float
    first_token_s: float | None
    duration_s: float | None


@with_config(CLOSED)
class HeadsPage(TypedDict):
    """Answer of `GET /view/heads`."""

    turns: list[HeadJson]
    next: int | None
    """The parameter `since` of the next page."""


@with_config(CLOSED)
class ForksPage(TypedDict):
    """Answer of `GET /view/forks`."""

    turns: list[HeadJson]
    next: float | None
    """The parameter `before` of the next page."""


@with_config(CLOSED)
class CutText(TypedDict):
    """The beginning of a long text, and the length of the whole."""

    text: str
    chars: int


@with_config(CLOSED)
class ToolCallJson(TypedDict):
    """A tool call of a message."""

    id: str
    name: str
    arguments: str | CutText


@with_config(CLOSED)
class MessageJson(TypedDict):
    """A message of a conversation. Where an image stands in `text`, it has the image's sha256
    between two characters U+FDD1; `GET /view/image` has the image."""

    role: str
    text: str | CutText
    reasoning: str | CutText | None
    tool_calls: list[ToolCallJson]
    more_calls: int
    """Number of tool calls that are left out."""
    tool_call_id: str | None


@with_config(CLOSED)
class TurnJson(TypedDict):
    """What a turn adds to its conversation."""

    index: int
    recorded: bool
    """Whether the texts of the turn are in the record."""
    after: int | None
    same_as: int | None
    messages: list[MessageJson]
    more_messages: int
    tools: list[str]
    answer: MessageJson | None
    sampling: dict[str, Any]


@with_config(CLOSED)
class TurnsAnswer(TypedDict):
    """Answer of `GET /view/turns`."""

    turns: list[TurnJson]


TextPiece = TypedDict("TextPiece", {"text": str, "from": int, "chars": int})  # `from` is a keyword
"""Answer of `GET /view/text`: a piece, where it begins, and the length of the whole text."""


@with_config(CLOSED)
class ShownTokens(TypedDict):
    """Ids of tokens, and their texts if the tokenizer is known. An image is one of them."""

    ids: list[int]
    texts: list[str] | None
    images: list[tuple[int, int, str]]
    """`(index, tokens, sha256)` of each image."""


@with_config(CLOSED)
class ForkTokens(TypedDict):
    """The tokens around a fork."""

    parent: int
    shared: int
    before: ShownTokens
    recorded: ShownTokens
    sent: ShownTokens


@with_config(CLOSED)
class FieldChange(TypedDict):
    """A field of a message that differs. Parts are `[operation, text]`: `=` in both, `-` only
    recorded, `+` only sent, `…` left out."""

    field: str
    parts: list[list[str]]


@with_config(CLOSED)
class ForkJson(TypedDict):
    """Answer of `GET /view/fork`: what the agent sent against what was recorded. Without a
    recorded conversation to compare with, only the first four keys are there."""

    index: int
    cause: ForkCause | None
    against: int | None
    tokens: ForkTokens | None
    common: NotRequired[int]
    sent_messages: NotRequired[int]
    recorded_messages: NotRequired[int]
    recorded: NotRequired[MessageJson | None]
    sent: NotRequired[MessageJson | None]
    changes: NotRequired[list[FieldChange]]


@with_config(CLOSED)
class TrainedTokens(TypedDict):
    """The trainer's side of the tokens; null where it did not use the token."""

    step: int
    advantages: NotRequired[list[float | None]]
    logprobs: NotRequired[list[float | None]]
    entropies: NotRequired[list[float | None]]
    """In nats, of the distribution over the vocabulary from which the trainer's policy would sample
    the token."""
    trained: NotRequired[list[bool | None]]


@with_config(CLOSED)
class AlternativesJson(TypedDict):
    """The most probable tokens at each position, in descending order; empty where none are
    recorded."""

    ids: list[list[int]]
    logprobs: list[list[float]]
    texts: dict[str, str] | None
    """The text of each id; null if the tokenizer is not known."""


@with_config(CLOSED)
class TokensPage(TypedDict):
    """Answer of `GET /view/tokens`. All lists but `spans` have one entry per token."""

    start: int
    total: int
    prompt_tokens: int
    shared_tokens: int
    ids: list[int]
    texts: list[str] | None
    logprobs: list[float | None]
    spans: list[tuple[int, int, int, bool, bool, int | None]]
    """`(start, end, turn, sampled, trained, version)`"""
    alternatives: NotRequired[AlternativesJson]
    """Missing if no token of the page has any."""
    images: NotRequired[list[tuple[int, int, str]]]
    """`(start, end, sha256)`; missing if the page has none."""
    trained: NotRequired[TrainedTokens]


@with_config(CLOSED)
class HitsPage(TypedDict):
    """Answer of `GET /view/search`."""

    hits: list[HitJson]
    read: int
    """Number of turns that were read."""
    next: int | None
    """The parameter `before` that goes on with older turns."""


@with_config(CLOSED)
class RulesAnswer(TypedDict):
    """Answer of `GET /view/rules`."""

    rules: list[RuleJson]
    may_save: bool


@with_config(CLOSED)
class RuleName(TypedDict):
    """Body of `POST /view/rules/remove`."""

    name: str


@with_config(CLOSED)
class PolicyVersionJson(TypedDict):
    """A policy, and the version that is sampled from."""

    name: str
    version: int


@with_config(CLOSED)
class LearnerJson(TypedDict):
    """A policy that is learned from sessions, as the recorder serves it."""

    policy: str
    person: str
    """Whose sessions it learns from; empty: those of several."""
    folder: str
    """The learner's, which has its journal."""
    running: bool
    """Whether the learner's process lives."""
    stable: int
    """Number of the adapter; 0: the engines' own weights."""
    canary: int | None
    share: float
    """Share of the new sessions that the canary gets."""
    frozen: bool
    order: str
    """What a person wants of the canary, which the learner has not done yet."""
    journal: list[int]
    """The file's inode and size."""
    journal_at: float | None
    """When it was written last; null: never."""


@with_config(CLOSED)
class DecisionJson(TypedDict):
    """A decision about an adapter, or about a policy."""

    at: float
    kind: str
    """`update`, `failed` (an update), `gate` (passed), `refused` (by a gate), `canary` (it begins),
    `promote`, `rollback`, `order` (a person wants one of these), `freeze`, `thaw` or `forgot`."""
    adapter: int | None
    beside: int | None
    """Of an update: the adapter that it began with; of a canary: the stable one."""
    by: str
    """`test`, `person`, `gate`, `engine`, `undecided`, `newer` or `interrupted`."""
    person: str
    """Who ordered it."""
    why: list[str]
    figures: dict[str, float]
    went_well: dict[str, list[int]]
    """Adapter (`canary`, `stable`) → number of its sessions that went well, and of all of them."""
    sessions: list[str]
    """Those that it was trained on, or that were compared."""
    more_sessions: int


@with_config(CLOSED)
class DecisionsPage(TypedDict):
    """Answer of `GET /view/decisions`."""

    decisions: list[DecisionJson]
    next: int | None
    """The parameter `before` of the next page."""


@with_config(CLOSED)
class RecordState(TypedDict):
    """What the process that records knows besides the record."""

    engines: Sequence[EngineInfo]
    policies: list[PolicyVersionJson]
    """The policies other than the engines' own weights."""
    paused: bool
    waiting: int
    """Number of calls that wait for room in a cache."""
    rule_faults: list[RuleFault]
    """The last errors while search rules were matched."""
    learners: list[LearnerJson]


@with_config(CLOSED)
class StateJson(RecordState):
    """What the page shows besides the record."""

    runs: list[RunStamps]


@with_config(CLOSED)
class StateAnswer(StateJson):
    """Answer of `GET /view/state`."""

    tokenizer: bool
    """Whether texts of tokens are sent."""
    may_edit: bool
    """Whether this reader may rate, tag and delete sessions, and save rules."""


@with_config(OPEN)
class StoredEvent(TypedDict):
    """An event of a session. Its other keys depend on its kind."""

    session_id: str
    seq: int
    at: float
    kind: str


@with_config(CLOSED)
class NewsJson(TypedDict):
    """What happened in the store: turns that began, turns that were answered, and events."""

    begun: list[HeadJson]
    answered: list[HeadJson]
    events: list[StoredEvent]
