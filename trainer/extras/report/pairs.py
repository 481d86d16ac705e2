"""Which trials a report shows next to each other, so that a reader sees what training has changed.

held-out tasks   failed before and solved after; then the reverse, if there is one; then others
training         of the last group whose rewards differ: a trial that was reinforced, and one
                 that was discouraged, with the advantages of their tokens
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from proxy.extras.view.run_folder import RecordedRun
from trainer.extras.report.transcripts import Transcripts
from trainer.extras.report.trials import SeenTrials, TaskTrials, Trial, clean

MAX_BYTES = 4_000_000
"""Of all transcripts together; pairs after that are left out."""
LOOKED_AT_STEPS = 20
"""Last steps among which one is looked for whose rewards differ."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Two trials with their labels. `colour`: what the colours of tokens show."""

    title: str
    note: str
    sides: Sequence[tuple[str, Trial]]
    colour: str = "probability"


@dataclass(slots=True)
class Changes:
    """Held-out tasks of two evaluations by what became of them, the largest change first."""

    better: list[Pair] = field(default_factory=list)
    worse: list[Pair] = field(default_factory=list)
    same: list[Pair] = field(default_factory=list)

    def chosen(self, count: int) -> list[Pair]:
        """Mostly tasks that got better, one that got worse if there is room, then others."""
        worse = self.worse[: 1 if count > 1 else 0]
        first = [*self.better[: count - len(worse)], *worse]
        return [*first, *self.same, *self.worse[len(worse) :]][:count]


async def pairs_json(
    run: RecordedRun, seen: SeenTrials, transcripts: Transcripts, count: int
) -> tuple[list[dict[str, Any]], str]:
    """At most `count` held-out pairs and one of training as JSON, and a note on what there is."""
    held_out = held_out_pairs(seen)
    trained = trained_pair(run, seen) if count else None
    chosen = [*held_out.chosen(count), *([trained] if trained else [])]
    made: list[dict[str, Any]] = []
    size = 0
    for pair in chosen:
        sides = [await transcripts.side(label, trial) for label, trial in pair.sides]
        trials = [trial["trial_id"] for _, trial in pair.sides]
        parting = await transcripts.parting(trials[0], trials[1]) if len(trials) == 2 else ""
        note = f"{pair.note} {parting}".strip()
        shown = {"title": pair.title, "note": note, "colour": pair.colour, "sides": sides}
        size += len(json.dumps(shown))
        if size > MAX_BYTES and made:
            break
        made.append(shown)
    if not chosen:
        return [], "This run has no trials that could be shown."
    note = (
        f"Of the held-out tasks, {len(held_out.better)} got better, {len(held_out.worse)} got "
        f"worse, and {len(held_out.same)} stayed the same. "
        if seen.difference
        else ""
    )
    if left := len(chosen) - len(made):
        note += f"{left} pairs are left out, because the report would be too large. "
    return made, note.strip()


def held_out_pairs(seen: SeenTrials) -> Changes:
    """The tasks that the first and the last evaluation judged, each with one trial of both. With
    one evaluation, its trials alone."""
    changes = Changes()
    if seen.first is None or seen.last is None:
        return changes
    if seen.first is seen.last:
        ordered = sorted(seen.last.tasks.items(), key=lambda item: (item[1].share, item[0]))
        changes.same = [_single(trials) for _, trials in ordered]
        return changes
    names = [name for name in seen.first.tasks if name in seen.last.tasks]
    gains = {name: seen.last.tasks[name].share - seen.first.tasks[name].share for name in names}
    for name in sorted(names, key=lambda name: (-abs(gains[name]), name)):
        before, after = seen.first.tasks[name], seen.last.tasks[name]
        kind = changes.better if gains[name] > 0 else changes.worse if gains[name] < 0 else None
        improved = gains[name] >= 0
        sides = [
            (_label(seen.first.name, seen.first.step), before.worst if improved else before.best),
            (_label(seen.last.name, seen.last.step), after.best if improved else after.worst),
        ]
        title = f"{before.best['task_id']}: {_became(before, after)}"
        (changes.same if kind is None else kind).append(Pair(title, _shares(before, after), sides))
    return changes


def trained_pair(run: RecordedRun, seen: SeenTrials) -> Pair | None:
    """The best and the worst trial of a group of one of the last steps, whose rewards differ."""
    if seen.last_trained_step is None:
        return None
    for step in range(seen.last_trained_step, seen.last_trained_step - LOOKED_AT_STEPS, -1):
        groups: dict[str, list[Trial]] = {}
        for trial in map(clean, run.step(step)["trials"]):
            if trial["kind"] != "eval" and trial["reward"] is not None and trial["turns"]:
                groups.setdefault(str(trial["group"] or trial["task_id"]), []).append(trial)
        ordered = [sorted(group, key=lambda each: each["reward"]) for group in groups.values()]
        spread = [group for group in ordered if group[0]["reward"] < group[-1]["reward"]]
        if spread:
            group = max(spread, key=lambda each: each[-1]["reward"] - each[0]["reward"])
            known = run.tokens.of(group[0]["trial_id"]) or run.tokens.of(group[-1]["trial_id"])
            return Pair(
                f"Training, step {step}, {group[0]['task_id']}: what was reinforced and what was "
                "discouraged",
                f"Two of {len(group)} rollouts of the same task in the same group. "
                + (
                    "The colours show the advantage: how much more (green) or less (red) likely "
                    "the update made each token."
                    if known
                    else "The run has no advantages of these tokens."
                ),
                [("less reward", group[0]), ("more reward", group[-1])],
                "advantage" if known else "probability",
            )
    return None


def _single(trials: TaskTrials) -> Pair:
    kind = "solved" if trials.share == 1 else "failed" if trials.share == 0 else "solved sometimes"
    title = f"{trials.worst['task_id']}: {kind}"
    return Pair(title, "A held-out task, which is not trained on.", [("trial", trials.worst)])


def _label(name: str, step: int) -> str:
    return f"{name} training" if name in ("before", "after") else f"at step {step}"


def _became(before: TaskTrials, after: TaskTrials) -> str:
    words = {0.0: "failed", 1.0: "solved"}
    was, now = words.get(before.share), words.get(after.share)
    if was is None or now is None:
        return f"solved in {before.share:.0%} before, {after.share:.0%} after"
    return f"{was} before and after" if was == now else f"{was} before, {now} after"


def _shares(before: TaskTrials, after: TaskTrials) -> str:
    if before.judged == after.judged == 1:
        return "A held-out task, which was not trained on."
    return (
        f"A held-out task, which was not trained on: {before.successes} of {before.judged} trials "
        f"succeeded before, {after.successes} of {after.judged} after."
    )
