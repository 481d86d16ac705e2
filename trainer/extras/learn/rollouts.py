"""A judged session → the rollout that is trained.

Invariant: a token is trained only in a turn that has a value, that this policy sampled, at the
temperature that is trained, and whose adapter is not too old. The recorded log-probabilities are
those of the adapter that the turn names. No token of a secret is trained.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from agent_loop.errors import TrajectoryError
from agent_loop.records import Group, Rollout, RolloutStatus, Segment, Task
from agent_loop.trajectory import build_segments
from proxy.extras.secrets import SessionSecrets
from proxy.extras.secrets.tokens import Decode
from proxy.records import Session, Turn, VersionSpan
from trainer.extras.learn.judging import Judged

NO_IMAGES = "images, which model.vision=text does not train"


@dataclass(frozen=True, slots=True)
class Lineage:
    """Which adapters a turn may come from. Example: Lineage("work", {0: 2, 3: 1, 5: 0}, 4, 1.0)"""

    policy: str
    ages: Mapping[int, int]
    """Adapter → generations between it and the one that is updated."""
    max_staleness: int
    temperature: float


@dataclass(frozen=True, slots=True)
class Prepared:
    """Example: Prepared(Group(…), Counter({"too old": 2}))"""

    group: Group | None
    """None: nothing of the session is trained."""
    left_out: Counter[str]
    """Why turns with a value are context → number of them."""


def prepared(
    session: Session,
    turns: Sequence[Turn],
    judged: Judged,
    lineage: Lineage,
    decode: Decode | None = None,
    *,
    reads_images: bool = False,
) -> Prepared:
    """The session as a group of its own, because evidence is compared with nothing. Tokens that
    spell a secret are context; without `decode`, all of a session that has one. The bytes of
    images are still to be added (`with_pictures`); without `reads_images`, a session that has one
    is left out."""
    left_out: Counter[str] = Counter()
    if not reads_images and any(turn.images for turn in turns):
        return Prepared(None, Counter({NO_IMAGES: len(turns)}))
    untrained = set(range(len(turns)))
    own = []
    for turn in turns:
        number = adapter_of(turn, lineage.policy)
        own.append(turn if number is None else _numbered(turn, number))
        if turn.index not in judged.turns:
            continue
        if (why := _why_not(turn, number, lineage)) is None:
            untrained.discard(turn.index)
        else:
            left_out[why] += 1
    try:
        segments = build_segments(own, untrained=untrained)
    except TrajectoryError as error:
        return Prepared(None, left_out + Counter([f"inconsistent records ({error})"]))
    segments = _without_secrets(session, turns, segments, decode, left_out)
    if not any(segment.mask.any() for segment in segments):
        return Prepared(None, left_out)
    task = Task(session.session_id, {})
    rollout = Rollout(
        session.session_id,
        task,
        RolloutStatus.DONE,
        judged.value,
        segments=segments,
        turn_returns={turn: value for turn, value in judged.turns.items() if turn not in untrained},
        num_turns=len(turns),
    )
    return Prepared(Group(session.session_id, task, (rollout,)), left_out)


def scored(
    session: Session,
    turns: Sequence[Turn],
    policy: str,
    temperature: float,
    *,
    reads_images: bool = False,
) -> Group | None:
    """The session as a group of which every sampled token is scored, those of secrets too. None:
    its probability cannot be computed, because of images that the model does not read in training,
    another temperature, or turns of another session or policy."""
    numbers = [adapter_of(turn, policy) for turn in turns]
    same = all(float(t.sampling.get("temperature", 1.0)) == temperature for t in turns if t.sampled)
    unread = not reads_images and any(turn.images for turn in turns)
    if not same or session.origin is not None or None in numbers or unread:
        return None
    own = [_numbered(turn, number or 0) for turn, number in zip(turns, numbers, strict=True)]
    try:
        segments = build_segments(own)
    except TrajectoryError:
        return None
    if not any(segment.mask.any() for segment in segments):
        return None
    task = Task(session.session_id, {})
    status = RolloutStatus.DONE
    rollout = Rollout(
        session.session_id, task, status, 0.0, segments=segments, num_turns=len(turns)
    )
    return Group(session.session_id, task, (rollout,))


def adapter_of(turn: Turn, policy: str) -> int | None:
    """The number of the adapter that sampled the turn; 0: the engines' own weights; None: another
    policy."""
    if not turn.policy:
        return 0
    name, _, number = turn.policy.rpartition("-")
    return int(number) if name == policy and number.isdecimal() else None


def _without_secrets(
    session: Session,
    turns: Sequence[Turn],
    segments: Sequence[Segment],
    decode: Decode | None,
    left_out: Counter[str],
) -> tuple[Segment, ...]:
    secrets = SessionSecrets(decode)
    secrets.add_session(session)
    secrets.add(turns)
    if not len(secrets.known):
        return tuple(segments)
    kept = []
    of_segments = secrets.of_pieces([segment.turns for segment in segments])
    for segment, is_secret in zip(segments, of_segments, strict=True):
        left_out["tokens of a secret"] += int((segment.mask & is_secret).sum())
        kept.append(segment.training_only(~is_secret))
    return tuple(kept)


def _numbered(turn: Turn, number: int) -> Turn:
    """The engines' own weights report versions of their own."""
    spans = (VersionSpan(number, 0, len(turn.sampled_ids)),) if len(turn.sampled_ids) else ()
    return msgspec.structs.replace(turn, versions=spans)


def _why_not(turn: Turn, number: int | None, lineage: Lineage) -> str | None:
    if number is None:
        return "sampled by another policy"
    if number not in lineage.ages:
        return "sampled by an adapter that is not known"
    if lineage.ages[number] > lineage.max_staleness:
        return "sampled by an adapter that is too old"
    if float(turn.sampling.get("temperature", 1.0)) != lineage.temperature:
        return "sampled at another temperature"
    return None
