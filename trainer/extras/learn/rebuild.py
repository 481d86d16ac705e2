"""Computes adapters again from their record: to prove them, or to forget sessions.

Invariant: an adapter that is rebuilt without a session is, bit for bit, the one that the same
batches without that session give. What was sampled later stays as it was sampled, by adapters that
had learned it. When forgetting ends, no file of the learner holds a token or an id of the session,
and no adapter remains that has learned it, except one that an open session still has, which goes
with that session.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Any

from agent_loop.records import Group
from trainer.errors import TrainerError
from trainer.extras.learn.gates import as_json, refusals
from trainer.extras.learn.journal import History
from trainer.extras.learn.learner import DailyLearner, made_with
from trainer.extras.learn.update import UpdateAdapter
from trainer.extras.ledger.ledger import Line, line_of_step
from trainer.settings.values import changed_keys


class RebuildError(TrainerError):
    """An adapter is not what the journal says."""


async def proven(learner: DailyLearner) -> list[str]:
    """Computes the stable adapter and its ancestors again, each from its parent. Returns a line per
    adapter.

    Raises:
        RebuildError: one has other weights, gradients or tokens than the journal says, or was made
            with other settings.
    """
    said = []
    _check_settings(learner, _line(learner))
    for number in _line(learner):
        line = learner.history.updates[number]
        groups = learner.journal.batch(number)
        bad = learner.config.update.bad
        scratch = UpdateAdapter(learner.adapters, number, line["parent"], groups, bad, keep=False)
        found = line_of_step(groups, (await learner.rank_zero.ask(scratch)).evidence)
        for name in ("groups", "policies", "sums"):
            if found[name] != line[name]:
                raise RebuildError(f"adapter {number}: its {name} differ from the journal's")
        said.append(f"adapter {number}: equal, weights {_weights(line)[:16]}")
    return said


@dataclass(frozen=True, slots=True)
class Forgotten:
    """What forgetting did. Example: Forgotten({5: 8, 7: 9}, dropped=(6,))"""

    rebuilt: Mapping[int, int]
    """Adapter → the one in its place."""
    dropped: tuple[int, ...]
    """Adapters that had learned it, and that nothing descends from."""
    refused: Mapping[int, Sequence[str]] = field(default_factory=dict)
    """Rebuilt adapter that a gate refuses → why. Its parent is in its place."""


def check_forgetting(learner: DailyLearner, sessions: Collection[str]) -> None:
    """Raises RebuildError: what has learned these sessions was made with other settings."""
    tainted = _tainted(learner.history, sessions)
    _check_settings(learner, [each for each in _kept_line(learner) if each in tainted])


async def forget(learner: DailyLearner, sessions: Collection[str]) -> Forgotten:
    """Removes the sessions from what was learned, and from the learner's folder. The recorder's
    record must be removed before.

    Raises:
        LedgerError: a batch is missing or damaged.
        RebuildError: as `check_forgetting`; nothing is removed.
    """
    check_forgetting(learner, sessions)
    history, journal = learner.history, learner.journal
    tainted = _tainted(history, sessions)
    tests = without(await learner.held_out(), sessions)
    renamed: dict[int, int] = {}
    changed: dict[int, Line] = {}
    refused: dict[int, Sequence[str]] = {}
    harmful: set[str] = set()
    following = history.last
    for number in (each for each in _kept_line(learner) if each in tainted):
        before = int(history.updates[number]["parent"])
        parent = renamed.get(before, before)
        groups = without(journal.batch(number), sessions)
        if not groups:
            renamed[number] = parent
            continue
        following += 1
        batch = journal.keep_batch(following, groups)
        bad = learner.config.update.bad
        request = UpdateAdapter(learner.adapters, following, parent, groups, bad, tests)
        done = await learner.rank_zero.ask(request)
        if why := refusals(done.measures, learner.config.gates):
            refused[following], renamed[number] = why, parent
            harmful.update(history.updates[number]["sessions"])
            continue
        renamed[number] = following
        changed[number] = {
            "number": following,
            "parent": parent,
            "batch": batch,
            "made_with": made_with(learner.config),
            "measures": as_json(done.measures),
            **line_of_step(groups, done.evidence),
        }
    dropped = tuple(sorted(tainted - renamed.keys()))
    replaced = dict(renamed)
    for number in dropped:  # a parent is smaller
        before = int(history.updates[number]["parent"])
        replaced[number] = replaced.get(before, before)
    aside = (history.set_aside | harmful) - set(sessions)
    told = {
        "count": len(sessions),
        "sessions": sorted(map(_digest, sessions)),
        "of": journal.head,
        "replaced": {str(old): new for old, new in replaced.items()},
        "last": following,
        "set_aside": sorted(aside),
        "tried": sorted(history.tried - set(sessions)),
        "refused": {str(each): list(why) for each, why in refused.items()},
    }
    lines = list(_rewritten(journal.lines, set(sessions), renamed, changed, replaced))
    lines += [{"kind": "forgot", "at": lines[-1]["at"], **told}] if lines else []
    journal.replace(lines)
    for number in (*tainted, *refused):
        journal.batch_file(number).unlink(missing_ok=True)
        shutil.rmtree(learner.adapters.path(number), ignore_errors=True)
    learner.read_journal()
    return Forgotten(renamed, dropped, refused)


def _tainted(history: History, sessions: Collection[str]) -> set[int]:
    """The adapters that have learned one of the sessions, themselves or by an ancestor."""
    found = set[int]()
    for number, update in sorted(history.updates.items()):
        learned = {*update["sessions"], *update["replayed"]}
        if learned.intersection(sessions) or update["parent"] in found:
            found.add(number)
    return found


def _check_settings(learner: DailyLearner, numbers: Sequence[int]) -> None:
    """Raises RebuildError: an adapter would be another one, because settings differ."""
    now = made_with(learner.config)
    for number in numbers:
        line = learner.history.updates[number]
        if changed := list(changed_keys(line.get("made_with", now), now)):
            raise RebuildError(
                f"adapter {number} was made with other values of {', '.join(changed)}, and cannot "
                "be computed again with these; set them as `made_with` in the journal has them"
            )


def without(groups: Sequence[Group], sessions: Collection[str]) -> list[Group]:
    """The groups without the rollouts of these sessions."""
    kept = [
        replace(group, rollouts=tuple(r for r in group.rollouts if r.trial_id not in sessions))
        for group in groups
    ]
    return [group for group in kept if any(rollout.trainable for rollout in group.rollouts)]


def _line(learner: DailyLearner) -> list[int]:
    """The stable adapter and its ancestors, the oldest first, without 0."""
    return [each for each in learner.history.ancestors(learner.history.stable) if each][::-1]


def _kept_line(learner: DailyLearner) -> list[int]:
    """The adapters that are kept: those of `_line`, and the canary."""
    canary = learner.history.canary
    return [*_line(learner), *([] if canary is None else [canary])]


def _rewritten(
    lines: Sequence[Line],
    sessions: set[str],
    renamed: Mapping[int, int],
    changed: Mapping[int, Line],
    replaced: Mapping[int, int],
) -> Iterator[Line]:
    """The lines without these sessions, with the rebuilt adapters in the place of the old ones."""
    for line in lines:
        number = int(line.get("number", 0))
        if line.get("session") in sessions or number in replaced.keys() - renamed:
            continue
        if line["kind"] in ("update", "gate", "canary") and number in renamed.keys() - changed:
            continue  # nothing of its batch is left
        told: dict[str, Any] = dict(line)
        for key in ("sessions", "replayed", "set_aside", "compared", "tried"):
            if key in told:
                told[key] = [each for each in told[key] if each not in sessions]
        for key in ("number", "parent", "stable"):
            if key in told:
                told[key] = renamed.get(told[key], told[key])
        if line["kind"] == "forgot":
            told["replaced"] = {
                old: replaced.get(new, new) for old, new in line.get("replaced", {}).items()
            }
        if line["kind"] == "update" and number in changed:
            told |= {name: value for name, value in changed[number].items() if name != "measures"}
            told.pop("metrics", None)
        if line["kind"] == "gate" and number in changed:
            told["measures"] = changed[number]["measures"]
        yield told


def _weights(line: Line) -> str:
    (policy,) = line["policies"].values()
    return str(policy["weights"])


def _digest(session: str) -> str:
    """By which a journal shows that a session was forgotten, to those who know its id."""
    return sha256(session.encode()).hexdigest()
