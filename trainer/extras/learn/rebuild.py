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
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any

from agent_loop.records import Group
from trainer.errors import TrainerError
from trainer.extras.learn.learner import DailyLearner
from trainer.extras.learn.update import UpdateAdapter
from trainer.extras.ledger.ledger import Line, line_of_step


class RebuildError(TrainerError):
    """An adapter is not what the journal says."""


async def proven(learner: DailyLearner) -> list[str]:
    """Computes the stable adapter and its ancestors again, each from its parent. Returns a line per
    adapter.

    Raises:
        RebuildError: one has other weights, gradients or tokens than the journal says.
    """
    said = []
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


async def forget(learner: DailyLearner, sessions: Collection[str]) -> Forgotten:
    """Removes the sessions from what was learned, and from the learner's folder. The recorder's
    record must be removed before.

    Raises:
        LedgerError: a batch is missing or damaged.
    """
    history, journal = learner.history, learner.journal
    line = [*_line(learner), *([] if history.canary is None else [history.canary])]
    tainted = {
        number
        for number, update in sorted(history.updates.items())
        if set(sessions) & {*update["sessions"], *update["replayed"]}
    }
    for number in sorted(history.updates):
        if history.updates[number]["parent"] in tainted:
            tainted.add(number)
    renamed: dict[int, int] = {}
    changed: dict[int, Line] = {}
    following = history.last
    for number in (each for each in line if each in tainted):
        before = int(history.updates[number]["parent"])
        parent = renamed.get(before, before)
        groups = without(journal.batch(number), sessions)
        if not groups:
            renamed[number] = parent
            continue
        following += 1
        batch = journal.keep_batch(following, groups)
        bad = learner.config.update.bad
        request = UpdateAdapter(learner.adapters, following, parent, groups, bad)
        evidence = (await learner.rank_zero.ask(request)).evidence
        renamed[number] = following
        changed[number] = {
            "number": following,
            "parent": parent,
            "batch": batch,
            "instead_of": number,
            **line_of_step(groups, evidence),
        }
    dropped = tuple(sorted(tainted - renamed.keys()))
    told = {"count": len(sessions), "sessions": sorted(map(_digest, sessions)), "of": journal.head}
    lines = list(_rewritten(journal.lines, set(sessions), renamed, changed, set(dropped)))
    lines += [{"kind": "forgot", "at": lines[-1]["at"], **told}] if lines else []
    journal.replace(lines)
    for number in tainted:
        journal.batch_file(number).unlink(missing_ok=True)
        shutil.rmtree(learner.adapters.path(number), ignore_errors=True)
    learner.read_journal()
    return Forgotten(renamed, dropped)


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


def _rewritten(
    lines: Sequence[Line],
    sessions: set[str],
    renamed: Mapping[int, int],
    changed: Mapping[int, Line],
    dropped: set[int],
) -> Iterator[Line]:
    """The lines without these sessions, with the rebuilt adapters in the place of the old ones."""
    for line in lines:
        number = int(line.get("number", 0))
        if line.get("session") in sessions or number in dropped:
            continue
        if line["kind"] in ("update", "gate", "canary") and number in renamed.keys() - changed:
            continue  # nothing of its batch is left
        told: dict[str, Any] = dict(line)
        for key in ("sessions", "replayed", "set_aside", "compared"):
            if key in told:
                told[key] = [each for each in told[key] if each not in sessions]
        for key in ("number", "parent", "stable"):
            if key in told:
                told[key] = renamed.get(told[key], told[key])
        if line["kind"] == "update" and number in changed:
            told |= changed[number]
            told.pop("metrics", None)
        yield told


def _weights(line: Line) -> str:
    (policy,) = line["policies"].values()
    return str(policy["weights"])


def _digest(session: str) -> str:
    """By which a journal shows that a session was forgotten, to those who know its id."""
    return sha256(session.encode()).hexdigest()
