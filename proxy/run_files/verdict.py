"""How a run is doing, decided once, from what its folder says: one of `MEANINGS`.

The first that holds, in this order, is the verdict. Each comes with the evidence that decided, with
95 % intervals; with its cause; and with commands to go on with. The console, the page, the report,
`summary.json`, `agentic-train status` and the metric `agentic_proxy_run_verdict` have it from here.

Invariant: the verdict is a function of the folder's files, and for a run that waits, of the time.
"""

from __future__ import annotations

import json
import math
import shlex
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from statistics import fmean, median
from typing import Any

from pydantic import with_config
from typing_extensions import TypedDict

from proxy.http.valid_json import CLOSED
from proxy.machine.secrecy import without_credentials
from proxy.run_files.causes import is_infrastructure
from proxy.run_files.evidence import Evaluated, Evidence, Failed, Groups, StepTrials
from proxy.run_files.formats import duration, interval, percent, points, signed
from proxy.run_files.intervals import change_of_means, wilson_interval
from proxy.run_files.trial_files import TrialFiles


class Word(StrEnum):
    """The verdicts, in the order in which they are looked for."""

    FAILING = "failing"
    STARVED = "starved"
    COLLAPSED = "collapsed"
    LEARNING = "learning"
    ALREADY_SOLVED = "already solved"
    TOO_HARD = "too hard"
    NOT_SEPARATING = "not separating"
    TOO_EARLY = "too early"


MEANINGS: Mapping[Word, str] = {
    Word.FAILING: "trials fail: the agent, the verifier or a part of one's own",
    Word.STARVED: "trials fail or wait for the infrastructure: engine, proxy, disk, network",
    Word.COLLAPSED: "it was better: rewards fell far below their best, or below those of the first "
    "steps, or held-out success fell",
    Word.LEARNING: "rewards, or held-out success, rose by more than chance",
    Word.ALREADY_SOLVED: "most groups have nothing to learn: every rollout succeeds",
    Word.TOO_HARD: "most groups have nothing to learn: every rollout gets the same low reward",
    Word.NOT_SEPARATING: "there were steps enough, and rewards did not move by more than chance",
    Word.TOO_EARLY: "none of these can be said yet",
}

WINDOW_STEPS = 10
"""The last steps, by which the present is judged."""
MOST_COMPARED = 20
"""Steps of each end of a run whose means are compared; a third of a shorter run."""
LEAST_STEPS = 9
"""Fewer steps have no trend: three at each end, and as many between."""
ENOUGH_STEPS = 15
"""With so many and no trend, a run does not learn."""
FAILING_SHARE = 0.2
"""Of trials: if more fail, what is trained is not what the tasks ask."""
UNIFORM_SHARE = 0.5
"""Of groups: if more have equal rewards, most of what is sampled trains nothing."""
LEAST_GROUPS = 8
FALL = 0.2
"""Of the range of rewards: a smaller fall is not a collapse."""
WAITING_TIMES = 10.0
LEAST_WAIT_S = 600.0
"""A run that waits for its first trial for this long, and for `WAITING_TIMES` as long as it usually
samples, is starved."""
SHOWN_FAILURES = 5
LAST_LINES = 5
LINE_CHARS = 240


@with_config(CLOSED)
class EvidenceJson(TypedDict):
    """A number that decided. Example: {"what": "groups in which every rollout failed", "value":
    0.97, "low": 0.84, "high": 0.99, "of": 32, "unit": "share"}"""

    what: str
    value: float
    low: float | None
    """95 % interval; null where none is known."""
    high: float | None
    of: int
    """Number of the things that were counted: groups, trials, tasks, steps."""
    unit: str
    """`share`, `points` (difference of shares), `reward`, `loss` or `s`."""


@with_config(CLOSED)
class NextJson(TypedDict):
    """Something to do, and the command for it."""

    what: str
    command: str


@with_config(CLOSED)
class FailureJson(TypedDict):
    """Trials that failed for one cause."""

    cause: str
    trials: int
    of: int
    """Number of all trials."""
    trial_id: str
    """The last of them."""
    folder: str
    lines: list[str]
    """The last lines of its agent, or of its verifier."""


@with_config(CLOSED)
class VerdictJson(TypedDict):
    """The verdict of a run."""

    verdict: str
    step: int
    sentence: str
    """What is so, in words and with its interval."""
    cause: str
    """Why."""
    evidence: list[EvidenceJson]
    next: list[NextJson]
    failures: list[FailureJson]


@dataclass(slots=True)
class _Found:
    """A verdict that holds."""

    word: Word
    sentence: str
    cause: str
    evidence: list[EvidenceJson] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Change:
    """The mean of a measure at the end of the run minus that of other steps."""

    measure: str
    """`reward` or `loss`."""
    before: float
    after: float
    change: float
    bounds: tuple[float, float]
    steps: int
    """At each end."""

    @property
    def is_worse(self) -> bool:
        """By more than chance."""
        return self.bounds[1] < 0 if self.measure == "reward" else self.bounds[0] > 0

    @property
    def json(self) -> EvidenceJson:
        return _evidence(
            f"change of the mean {self.measure} between {self.steps} steps and the last ones",
            self.change,
            self.bounds,
            2 * self.steps,
            self.measure,
        )

    @property
    def words(self) -> str:
        low, high = map(signed, self.bounds)
        return (
            f"{self.measure} went from {self.before:.3g} to {self.after:.3g} "
            f"({signed(self.change)}, 95 % interval {low} to {high})"
        )


class RunVerdict:
    """Decides. Example: RunVerdict(folder, evidence, summary, config).json()["verdict"]"""

    def __init__(
        self,
        folder: Path,
        evidence: Evidence,
        summary: Mapping[str, Any],
        config: Mapping[str, str],
        *,
        now: Mapping[str, Any] | None = None,
        at: float | None = None,
    ) -> None:
        """`summary`: of `summary.json`, its `status` and its `error`. `config`: the configuration
        as `flat_config` gives it. `now`: what `now.json` holds, of a run that goes on. `at`: the
        time in Unix seconds; None: this moment."""
        self._folder = folder
        self._seen = evidence
        self._status = summary.get("status")
        error = summary.get("error")
        self._error = without_credentials(error) if isinstance(error, str) else ""
        self._config = config
        self._now = now or {}
        self._at = time.time() if at is None else at
        self._steps = sorted(step for step, each in evidence.steps.items() if each.trials)
        self._of_window = self._steps[-WINDOW_STEPS:]

    def json(self) -> VerdictJson:
        looks: tuple[Callable[[], _Found | None], ...] = (
            self._failing,
            self._starved,
            self._collapsed,
            self._learning,
            self._uniform,
            self._not_separating,
        )
        found = next((found for look in looks if (found := look()) is not None), None)
        found = found or self._too_early()
        last = max([*self._steps, *self._seen.measures], default=0)
        return {
            "verdict": found.word.value,
            "step": last,
            "sentence": found.sentence,
            "cause": found.cause,
            "evidence": found.evidence,
            "next": list(self._next(found.word)),
            "failures": self.failures(),
        }

    def failures(self) -> list[FailureJson]:
        """The causes of failed trials, the most frequent first."""
        ordered = sorted(self._seen.failures.items(), key=lambda item: -item[1].trials)
        return [self._failure(cause, failed) for cause, failed in ordered[:SHOWN_FAILURES]]

    # What is looked for, in the order of the verdicts.

    def _failing(self) -> _Found | None:
        failed, trials, causes = self._failed()
        bounds = wilson_interval(failed / trials, trials) if trials else (0.0, 1.0)
        if bounds[0] > FAILING_SHARE:
            cause = causes.most_common(1)[0][0]
            infrastructure = sum(n for each, n in causes.items() if is_infrastructure(each))
            word = Word.STARVED if 2 * infrastructure > failed else Word.FAILING
            more = f", and {len(causes) - 1} other causes" if len(causes) > 1 else ""
            shown = f"{percent(failed / trials)}, 95 % interval {interval(bounds)}"
            return _Found(
                word,
                f"{failed} of the last {trials} trials failed ({shown}).",
                f"{cause} ({causes[cause]} of {failed} failed trials{more})",
                [_share("trials that failed", failed, trials)],
            )
        if self._status == "failed" and self._error and not _is_no_signal(self._error):
            word = Word.STARVED if is_infrastructure(self._error) else Word.FAILING
            return _Found(word, "An error ended the run.", self._error)
        return None

    def _starved(self) -> _Found | None:
        now = self._now
        started, ended = now.get("started_at"), now.get("ended")
        waits = now.get("phase") == "sampling" and ended == 0 and self._status == "running"
        if not waits or not isinstance(started, int | float):
            return None
        waited = self._at - started
        usual = [each["time/sample_s"] for each in self._measured("time/sample_s")[-WINDOW_STEPS:]]
        typical = median(usual) if usual else 0.0
        if waited < max(LEAST_WAIT_S, WAITING_TIMES * typical):
            return None
        of_usual = f"; sampling a step usually takes {duration(typical)}" if usual else ""
        return _Found(
            Word.STARVED,
            f"No trial has ended for {duration(waited)}{of_usual}.",
            "trials wait for an engine, a sandbox or the agent's own services",
            [_evidence("time without a finished trial", waited, None, 1, "s")],
        )

    def _collapsed(self) -> _Found | None:
        difference = self._seen.difference
        if difference is not None and difference.is_significant and difference.mean < 0:
            return _Found(
                Word.COLLAPSED, self._held_out(), self._why_collapsed(), [*self._held_out_json()]
            )
        change = self._change(self._best_before)
        if change is None:
            return None
        scale = self._seen.high - self._seen.low if change.measure == "reward" else change.before
        fell = change.change if change.measure == "reward" else -change.change
        if change.is_worse and math.isfinite(scale) and -fell >= FALL * scale:
            best = f"The mean {change.words} since its best {change.steps} steps."
            return _Found(Word.COLLAPSED, best, self._why_collapsed(), [change.json])
        return self._below_its_start()

    def _below_its_start(self) -> _Found | None:
        """A run that begins low cannot fall far."""
        difference, change = self._seen.difference, self._change(_first)
        rose = difference is not None and difference.is_significant
        if rose or change is None or not change.is_worse:
            return None
        if len(self._means()[1]) < ENOUGH_STEPS:
            return None
        sentence = f"In training the mean {change.words} between the first and the last steps."
        return _Found(Word.COLLAPSED, sentence, self._why_collapsed(), [change.json])

    def _learning(self) -> _Found | None:
        difference, change = self._seen.difference, self._change(_first)
        if difference is not None and difference.is_significant and difference.mean > 0:
            evidence = [*self._held_out_json(), *([change.json] if change else [])]
            return _Found(Word.LEARNING, self._held_out(), self._why_learning(), evidence)
        if change is None:
            return None
        rose = change.bounds[0] > 0 if change.measure == "reward" else change.bounds[1] < 0
        if not rose:
            return None
        sentence = f"In training the mean {change.words} between the first and the last steps."
        return _Found(Word.LEARNING, sentence, self._why_learning(), [change.json])

    def _uniform(self) -> _Found | None:
        """`already solved` or `too hard`."""
        groups = self._groups()
        if groups.all < LEAST_GROUPS:
            return None
        for count, word, what, cause in (
            (
                groups.solved,
                Word.ALREADY_SOLVED,
                "every rollout succeeded",
                "the policy solves these tasks already, so that rewards do not differ",
            ),
            (
                groups.unsolved,
                Word.TOO_HARD,
                "every rollout got the same low reward",
                self._why_too_hard(),
            ),
        ):
            bounds = wilson_interval(count / groups.all, groups.all)
            if bounds[0] > UNIFORM_SHARE:
                shown = f"{percent(count / groups.all)}, 95 % interval {interval(bounds)}"
                return _Found(
                    word,
                    f"In {count} of the last {groups.all} groups {what} ({shown}).",
                    cause,
                    [_share(f"groups in which {what}", count, groups.all), self._success_json()],
                )
        return None

    def _not_separating(self) -> _Found | None:
        change, groups = self._change(_first), self._groups()
        measured = self._means()[1]
        if change is None or len(measured) < ENOUGH_STEPS:
            return None
        equal = groups.solved + groups.unsolved
        evidence = [change.json]
        cause = "rewards differ within groups, but not by what the updates change: noise"
        if self._is_fine_tuning:
            cause = "the updates are too small, or the sessions have nothing in common to imitate"
        if groups.all:
            evidence.append(_share("groups without a signal", equal, groups.all))
        if groups.all and 2 * equal > groups.all:
            cause = (
                f"{percent(equal / groups.all)} of the groups have equal rewards: each task is "
                "always solved or never"
            )
        sentence = f"After {len(measured)} steps the mean {change.words}."
        return _Found(Word.NOT_SEPARATING, sentence, cause, evidence)

    def _too_early(self) -> _Found:
        steps = len(self._means()[1])
        if not steps and not self._seen.trials:
            return _Found(Word.TOO_EARLY, "No step has ended yet.", "nothing was trained yet")
        more = f", of which a trend needs {LEAST_STEPS}" if steps < LEAST_STEPS else ""
        numbers = [self._success_json()] if self._seen.trials else []
        number = "1 step has" if steps == 1 else f"{steps} steps have"
        return _Found(
            Word.TOO_EARLY, f"{number} ended{more}.", "no interval excludes chance yet", numbers
        )

    # What they look at.

    def _failed(self) -> tuple[int, int, Counter[str]]:
        """Failed trials, all trials, and causes: of the last steps, or before the first one of the
        last evaluation."""
        chosen = [self._seen.steps[step] for step in self._of_window]
        causes: Counter[str] = Counter()
        for each in chosen:
            causes.update(each.causes)
        if chosen:
            return causes.total(), sum(each.trials for each in chosen), causes
        last = self._seen.last
        if last is None:
            return 0, 0, causes
        causes.update({cause: each.trials for cause, each in self._seen.failures.items()})
        judged = sum(count for count, _ in last.tasks.values())
        return last.failed, last.failed + judged, causes

    @property
    def _is_fine_tuning(self) -> bool:
        """Whether the run imitates recorded sessions, without trials and rewards."""
        has_section = any(key.startswith("sft.") for key in self._config)
        return self._means()[0] == "loss" or (has_section and not self._seen.trials)

    def _measured(self, name: str) -> list[dict[str, float]]:
        found = sorted(self._seen.measures.items())
        return [measures for _, measures in found if name in measures]

    def _means(self) -> tuple[str, list[float]]:
        """The measure of the run, and its mean in each step: of rewards, or of the loss of a
        fine-tuning."""
        for name in ("sft/held_out_loss", "sft/loss"):
            losses = [each[name] for each in self._measured(name)]
            if len(losses) >= LEAST_STEPS or (losses and name == "sft/loss"):
                return "loss", losses
        rewards = [each["reward/mean"] for each in self._measured("reward/mean")]
        if rewards:
            return "reward", rewards
        steps = (self._seen.steps[step] for step in self._steps)
        return "reward", [each.reward_sum / each.judged for each in steps if each.judged]

    def _change(
        self, choose: Callable[[Sequence[float], int, bool], Sequence[float]]
    ) -> _Change | None:
        """The last steps against those that `choose` finds; None if there are too few."""
        measure, values = self._means()
        if len(values) < LEAST_STEPS:
            return None
        size = min(MOST_COMPARED, len(values) // 3)
        last = values[-size:]
        before = choose(values[:-size], size, measure == "loss")
        change, bounds = change_of_means(before, last)
        return _Change(measure, fmean(before), fmean(last), change, bounds, size)

    @staticmethod
    def _best_before(values: Sequence[float], size: int, is_loss: bool) -> Sequence[float]:
        windows = [values[at : at + size] for at in range(len(values) - size + 1)]
        return min(windows, key=fmean) if is_loss else max(windows, key=fmean)

    def _groups(self) -> Groups:
        found = Groups()
        for step in self._of_window:
            found = found + self._seen.steps[step].groups(self._seen.success_at)
        return found

    def _success_json(self) -> EvidenceJson:
        """Success in the last steps, or in the last evaluation if nothing was trained."""
        chosen = [self._seen.steps[step] for step in self._of_window]
        judged, successes = _judged(chosen, self._seen.last)
        what = "trials that succeeded" if chosen else "held-out trials that succeeded"
        return _share(what, successes, judged)

    def _held_out(self) -> str:
        first, last, difference = self._seen.first, self._seen.last, self._seen.difference
        assert first is not None
        assert last is not None
        assert difference is not None
        before, after = (percent(fmean(each.shares.values())) for each in (first, last))
        rose = "rose" if difference.mean > 0 else "fell"
        low, high = map(points, difference.interval)
        return (
            f"Held-out success {rose} from {before} to {after} ({points(difference.mean)} points "
            f"on {difference.tasks} tasks, 95 % interval {low} to {high})."
        )

    def _held_out_json(self) -> Iterator[EvidenceJson]:
        if (found := self._seen.difference) is not None and found.tasks:
            what = "change of held-out success"
            yield _evidence(what, found.mean, found.interval, found.tasks, "points")

    @property
    def _is_cut_short(self) -> bool:
        """Whether limits end most of the last trials."""
        chosen = [self._seen.steps[step] for step in self._of_window]
        return 2 * sum(each.truncated for each in chosen) > sum(each.judged for each in chosen)

    def _why_too_hard(self) -> str:
        if self._is_cut_short:
            chosen = [self._seen.steps[step] for step in self._of_window]
            cut, judged = (sum(each.truncated for each in chosen), _judged(chosen, None)[0])
            return f"a limit ended {cut} of {judged} trials before they could succeed (truncated)"
        return "no rollout of a task does better than another, so that nothing is reinforced"

    def _why_collapsed(self) -> str:
        """What changed with the rewards, as far as the metrics show it."""
        if self._is_cut_short:
            return self._why_too_hard()
        for name, what in (("actor/entropy", "entropy"), ("actor/grad_norm", "the gradient norm")):
            values = [each[name] for each in self._measured(name)]
            if len(values) < LEAST_STEPS:
                continue
            size = max(1, len(values) // 5)
            before, after = fmean(values[:size]), fmean(values[-size:])
            if name == "actor/entropy" and after < before / 4:
                return f"{what} fell from {before:.3g} to {after:.3g}: every rollout does the same"
            if after > 4 * before > 0:
                return f"{what} rose from {before:.3g} to {after:.3g}: the updates are too large"
        return "the updates made the policy worse, or it is rewarded for something else"

    def _why_learning(self) -> str:
        if self._is_fine_tuning:
            return "the policy says what the sessions' answers say"
        groups = self._groups()
        if groups.all and 2 * groups.solved > groups.all:
            share = percent(groups.solved / groups.all)
            return f"most tasks are solved: every rollout succeeds in {share} of the last groups"
        if groups.all:
            share = percent(1 - (groups.solved + groups.unsolved) / groups.all)
            return f"rewards differ in {share} of the last groups"
        return "the policy does better than at the start"

    def _failure(self, cause: str, failed: Failed) -> FailureJson:
        trial_id = str(failed.example.get("trial_id") or "")
        files = TrialFiles(self._folder / "trials", trial_id)
        text = files.last_words(cause)
        last = [line for line in without_credentials(text).splitlines() if line.strip()]
        return {
            "cause": cause,
            "trials": failed.trials,
            "of": self._seen.trials,
            "trial_id": trial_id,
            "folder": str(self._folder / "trials" / trial_id),
            "lines": [line[:LINE_CHARS] for line in last[-LAST_LINES:]],
        }

    # What to do.

    def _next(self, word: Word) -> Iterator[NextJson]:
        run = shlex.quote(str(self._folder))
        config = f"--config {run}/config.yaml"

        def step(what: str, command: str) -> NextJson:
            return {"what": what, "command": command}

        def train(what: str, name: str, *words: str) -> NextJson:
            given = " ".join(map(shlex.quote, words))
            program = "agentic-train sft" if self._is_fine_tuning else "agentic-train"
            return step(what, f"{program} {config} {given} trainer.run_dir={run}-{name}")

        epochs = f"sft.epochs={2 * self._number('sft.epochs', 1):.0f}"

        match word:
            case Word.TOO_HARD | Word.COLLAPSED if self._is_cut_short:
                yield step("see which limit ended them", f"agentic-proxy view {run}")
                limit_s = self._number("remote_agent.timeout_s", 1800)
                yield train(
                    "give each trial more time", "longer", f"remote_agent.timeout_s={4 * limit_s:g}"
                )
                limit = self._number("rollout.max_tokens", 0)
                if limit:
                    yield train("or more tokens", "longer", f"rollout.max_tokens={2 * limit:.0f}")
            case Word.TOO_HARD:
                yield step(
                    "record a stronger model on these tasks (any OpenAI-compatible endpoint)",
                    f"agentic-train collect {config} --out {run}-demonstrations "
                    "--model https://api.openai.com/v1 --model-name gpt-5",
                )
                yield step(
                    "fine-tune on what it solved; it ends with the command that trains on",
                    f"agentic-train sft {config} 'sft.sessions=[{self._folder}-demonstrations]' "
                    f"sft.kind=eval sft.min_reward={self._seen.success_at:g} "
                    f"trainer.run_dir={run}-sft",
                )
                size = self._number("rollout.group_size", 8)
                yield train(
                    "or sample larger groups, to find a rollout that succeeds",
                    "larger",
                    f"rollout.group_size={4 * size:.0f}",
                )
                yield train("or train on easier tasks", "easier", "data.train_files=[easier.jsonl]")
                yield train("or train a bigger model", "bigger", "model.path=FOLDER")
            case Word.ALREADY_SOLVED:
                yield train("train on harder tasks", "harder", "data.train_files=[harder.jsonl]")
                yield train(
                    "or sample until groups have a signal",
                    "signal",
                    "rollout.drop_uniform_groups=true",
                )
            case Word.NOT_SEPARATING if self._is_fine_tuning:
                lr = self._number("optimizer.lr", 1e-6)
                yield train("larger updates", "faster", f"optimizer.lr={3 * lr:.2g}")
                yield train("or more passes over the sessions", "longer", epochs)
            case Word.NOT_SEPARATING:
                yield step(
                    "look at two rollouts of one group: does the better one deserve its reward?",
                    f"agentic-proxy view {run}",
                )
                size = self._number("rollout.group_size", 8)
                yield train(
                    "larger groups, in which chance weighs less",
                    "larger",
                    f"rollout.group_size={2 * size:.0f}",
                )
                lr = self._number("optimizer.lr", 1e-6)
                yield train("or larger updates", "faster", f"optimizer.lr={3 * lr:.2g}")
            case Word.COLLAPSED:
                lr = self._number("optimizer.lr", 1e-6)
                yield train(
                    "begin again with smaller updates", "slower", f"optimizer.lr={lr / 3:.2g}"
                )
                yield step("read what the rollouts do now", f"agentic-proxy view {run}")
            case Word.FAILING:
                failed = self.failures()
                if failed and failed[0]["trial_id"]:
                    log = shlex.quote(f"{failed[0]['folder']}/agent.log")
                    yield step("read the log of a failed trial", f"less {log}")
                    yield step(
                        "run one trial alone after a change",
                        f"agentic-train collect {config} --limit 1 --out {run}-try",
                    )
                else:
                    yield step("read what ended the run", f"agentic-train report {run}")
                yield step("then go on", f"agentic-train resume {run}")
            case Word.STARVED:
                yield step("read what the processes say", f"tail -n 30 {run}/logs/*.log")
                yield step("then go on", f"agentic-train resume {run}")
            case Word.LEARNING:
                steps = self._number("trainer.steps", 0)
                if self._status == "done" and self._is_fine_tuning:
                    last = max([*self._steps, *self._seen.measures], default=0)
                    model = f"model.path={self._folder}/checkpoints/step-{last:06d}/model"
                    yield step(
                        "train on from it with rewards",
                        f"agentic-train {config} sft=null {shlex.quote(model)} "
                        f"trainer.run_dir={run}-rl",
                    )
                if self._status == "running":
                    yield step("watch it", f"agentic-train status {run}")
                elif self._status == "done":
                    yield step("read its report", f"agentic-train report {run}")
                    yield (
                        train("or fine-tune for longer", "longer", epochs)
                        if self._is_fine_tuning
                        else step(
                            "train longer",
                            f"agentic-train resume {run} trainer.steps={2 * steps:.0f}",
                        )
                    )
                else:
                    yield step("go on", f"agentic-train resume {run}")
            case Word.TOO_EARLY:
                if self._status in ("running", None):
                    yield step("ask again later", f"agentic-train status {run}")
                elif self._status == "done":
                    steps = max(2 * self._number("trainer.steps", 0), ENOUGH_STEPS)
                    yield (
                        train("fine-tune for longer", "longer", epochs)
                        if self._is_fine_tuning
                        else step(
                            "train longer", f"agentic-train resume {run} trainer.steps={steps:.0f}"
                        )
                    )
                else:
                    yield step("go on", f"agentic-train resume {run}")

    def _number(self, key: str, otherwise: float) -> float:
        try:
            found = json.loads(self._config.get(key, "null"))
        except ValueError:
            return otherwise
        is_number = isinstance(found, int | float) and not isinstance(found, bool)
        return float(found) if is_number else otherwise


def verdict_lines(verdict: VerdictJson) -> Iterator[str]:
    """The verdict as it is printed: what is so, why, what failed, and what to do."""
    yield f"verdict: {verdict['verdict']}. {verdict['sentence']}"
    yield f"  cause: {verdict['cause']}"
    for failure in verdict["failures"]:
        of = f"{failure['trials']} of {failure['of']} trials"
        yield f"  failed: {of}: {failure['cause']}; the last one is in {failure['folder']}"
        yield from (f"    | {line}" for line in failure["lines"])
    for each in verdict["next"]:
        yield f"  next: {each['what']}:"
        yield f"    {each['command']}"


def _first(values: Sequence[float], size: int, _is_loss: bool) -> Sequence[float]:
    return values[:size]


def _judged(steps: Sequence[StepTrials], last: Evaluated | None) -> tuple[int, int]:
    """Number of judged trials and of successes."""
    if steps or last is None:
        return sum(each.judged for each in steps), sum(each.successes for each in steps)
    counts = last.tasks.values()
    return sum(judged for judged, _ in counts), sum(successes for _, successes in counts)


def _share(what: str, count: int, of: int) -> EvidenceJson:
    share = count / of if of else 0.0
    return _evidence(what, share, wilson_interval(share, of), of, "share")


def _evidence(
    what: str, value: float, bounds: tuple[float, float] | None, of: int, unit: str
) -> EvidenceJson:
    low, high = bounds or (None, None)
    return {"what": what, "value": value, "low": low, "high": high, "of": of, "unit": unit}


def _is_no_signal(error: str) -> bool:
    """Whether the run ended because it had nothing to learn, which the rewards explain better."""
    return "trainer.no_signal_steps" in error
