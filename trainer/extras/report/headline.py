"""The report's first lines in plain English: what was trained, on what, from where to where.

Everything is text; `page` escapes it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from proxy.run_files.formats import duration, percent, points
from proxy.run_files.verdict import VerdictJson
from trainer.extras.report.series import SeenMetrics, is_number
from trainer.extras.report.trials import SeenTrials

AGENT_KEYS = (
    *("remote_agent.harbor.agent_name", "remote_agent.harbor.agent_import_path"),
    "remote_agent.command.argv",
    *("remote_agent.python.target", "remote_agent.http.url", "remote_agent.openenv.url"),
    "remote_agent.launcher.target",
)
TASK_KEYS = (*("data.train_files", "data.harbor.train_dir", "sft.sessions"),)


@dataclass(frozen=True, slots=True)
class Tile:
    """A number in large type. Example: Tile("Before", "36 %", "25 % to 48 %")"""

    label: str
    value: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class Headline:
    """The first lines of a report."""

    kind: str
    title: str
    sentences: Sequence[str]
    tiles: Sequence[Tile]
    verdict: VerdictJson | None = None
    """None for an evaluation."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What the first lines are made from."""

    summary: Mapping[str, Any]
    """As `RecordedRun.summary` returns it."""
    seen: SeenTrials
    metrics: SeenMetrics

    @property
    def is_evaluation(self) -> bool:
        """Whether the folder is that of `agentic-train eval`, where nothing is trained."""
        ran = self.summary["status"] is not None or self.seen.trained_tasks
        return not ran and self.seen.last is not None

    @property
    def machine(self) -> str:
        return str(self.summary["machine"] or "")

    @property
    def evaluations(self) -> list[Mapping[str, Any]]:
        return [each for each in self.summary["evaluations"] if is_number(each.get("success"))]

    def setting(self, key: str) -> Any:
        """A value of the configuration; None if it is not set, or too long to be shown."""
        try:
            return json.loads(self.summary["config"].get(key, "null"))
        except ValueError:
            return None

    def named(self, keys: Sequence[str], section: str) -> str:
        """The first of these settings that is set, or else the names in a section, as text."""
        key = next((key for key in keys if self.setting(key)), "")
        found = self.setting(key) or self.names_in(section)
        if not isinstance(found, list):
            return str(found)
        if key.endswith(".argv"):
            return " ".join(map(str, found))
        more = f" and {len(found) - 3} more" if len(found) > 3 else ""
        return ", ".join(map(str, found[:3])) + more

    def names_in(self, section: str) -> list[str]:
        """The names of the parts of a section, such as `agents`."""
        keys = [key.removeprefix(section) for key in self.summary["config"]]
        below = [key for key in keys if key.startswith(".")]
        return list(dict.fromkeys(key.split(".")[1] for key in below))


def headline(facts: Facts) -> Headline:
    title, ending = _title(facts), _ending(facts)
    return Headline(
        "Evaluation" if facts.is_evaluation else "Training run",
        title,
        [each for each in (_what(facts), _result(facts), ending) if each and each != title],
        _tiles(facts),
        facts.summary["verdict"],
    )


def _title(facts: Facts) -> str:
    shown, difference = facts.evaluations, facts.seen.difference
    if len(shown) > 1:
        before, after = (percent(each["success"]) for each in (shown[0], shown[-1]))
        if difference is None or not difference.is_significant:
            return f"Held-out success: {before} before, {after} after; no significant difference"
        if (difference.mean > 0) != (shown[-1]["success"] > shown[0]["success"]):
            return f"Held-out success: {before} before, {after} after, partly of other tasks"
        rose = "rose" if difference.mean > 0 else "fell"
        return f"Held-out success {rose} from {before} to {after}"
    if shown:
        return f"Held-out success: {percent(shown[0]['success'])}"
    if losses := facts.metrics.ends("sft/held_out_loss"):
        return f"Held-out loss {_course([f'{loss:.3g}' for loss in losses])}"
    if rates := facts.metrics.ends("rollout/success"):
        return f"Success in training {_course([*map(percent, rates)])} (not held out)"
    return _ending(facts) or f"Run {facts.summary['name']}"


def _course(values: Sequence[str]) -> str:
    """Of the first and the last value of a metric, or of the only one."""
    return f"went from {values[0]} to {values[-1]}" if len(values) > 1 else f"was {values[0]}"


def _what(facts: Facts) -> str:
    model = facts.setting("model.path") or "a model"
    tasks, steps = facts.named(TASK_KEYS, "data.train_sources"), facts.summary["steps"]
    where = f" on {facts.machine}" if facts.machine else ""
    took = f" The run took {_took(facts.summary['wall_s'])}{where}."
    if any(key.startswith("sft.") for key in facts.summary["config"]):
        source = f" recorded in {tasks}" if tasks else ""
        return f"{model} was trained by imitation of answers{source}, in {steps or 0} steps.{took}"
    agent = facts.named(AGENT_KEYS, "agents")
    of_agent = f" as the policy of the agent {agent}" if agent else ""
    if facts.is_evaluation:
        return f"{model} was evaluated{of_agent}."
    number = len(facts.seen.trained_tasks)
    of_tasks = f" on {number} different tasks" if number else ""
    source = f" of {tasks}" if tasks and number else f" on {tasks}" if tasks else ""
    return (
        f"{model} was trained{of_agent}{of_tasks}{source} with {_algorithm(facts)}, in "
        f"{steps or 0} steps{_groups(facts)}.{took}"
    )


def _algorithm(facts: Facts) -> str:
    preset = facts.setting("algorithm.preset")
    advantage, loss = (facts.setting(f"algorithm.{part}.name") for part in ("advantage", "loss"))
    parts = f"{advantage} advantages and the {loss} loss" if advantage and loss else ""
    if preset:
        return f"{preset} ({parts})" if parts else str(preset)
    return parts or "reinforcement learning"


def _groups(facts: Facts) -> str:
    groups, size = facts.setting("rollout.groups_per_step"), facts.setting("rollout.group_size")
    return f" of {groups} groups of {size} rollouts" if groups and size else ""


def _result(facts: Facts) -> str:
    shown, difference = facts.evaluations, facts.seen.difference
    if not shown and (made := facts.summary["evaluations"]):
        failed = sum(each.get("failed") or 0 for each in made)
        return f"No trial on held-out tasks was judged: {failed} failed."
    if not shown:
        return "There was no evaluation on held-out tasks."
    first = shown[0]
    if len(shown) == 1:
        return f"On {_tasks(first)} held-out tasks the policy succeeds in {_with_interval(first)}."
    sentence = (
        f"Of {_tasks(first)} held-out tasks, which were not trained on, the policy solved "
        f"{_with_interval(first)} at step {first.get('step', '?')} and "
        f"{_with_interval(shown[-1])} at step {shown[-1].get('step', '?')}."
    )
    if difference is None or not difference.tasks:
        return sentence + " No task was judged in both evaluations, so they cannot be compared."
    low, high = difference.interval
    significant = "is significant" if difference.is_significant else "is not significant"
    return sentence + (
        f" On the {difference.tasks} tasks that both judged, the difference is "
        f"{points(difference.mean)} points (95 % interval {points(low)} to {points(high)}); "
        f"{difference.better} got better and {difference.worse} got worse. The difference "
        f"{significant} (exact sign test, p = {difference.p_value:.2g})."
    )


def _ending(facts: Facts) -> str:
    status, steps = facts.summary["status"], facts.setting("trainer.steps")
    of = f"after {facts.summary['steps'] or 0} of {steps} steps" if steps else ""
    endings = {
        "running": f"The run is still going on, {of}." if of else "The run is still going on.",
        "stopped": f"The run was stopped {of}".rstrip() + ".",
        "failed": f"The run failed {of}".rstrip() + ".",
        "killed": f"The run's process was killed {of}".rstrip() + ".",
    }
    return endings.get(status or "", "")


def _tiles(facts: Facts) -> list[Tile]:
    shown, difference = facts.evaluations, facts.seen.difference
    tiles = [
        Tile(
            "Held-out success" if len(shown) == 1 else label,
            percent(each["success"]),
            _interval(each) and f"95 %: {_interval(each)}",
        )
        for label, each in zip(("Before", "After"), shown[:1] + shown[1:][-1:], strict=False)
    ]
    if difference is not None and difference.tasks:
        low, high = difference.interval
        note = f"points; 95 %: {points(low)} to {points(high)}"
        tiles.append(Tile("Difference", points(difference.mean), note))
    trials = facts.seen.count
    if facts.is_evaluation:
        return [*tiles, Tile("Trials", f"{trials:,}")]
    steps = str(facts.summary["steps"] or 0)
    tiles.append(Tile("Steps", steps, f"{trials:,} trials" if trials else ""))
    tiles.append(Tile("Time", _took(facts.summary["wall_s"]), facts.machine))
    return tiles


def _tasks(evaluation: Mapping[str, Any]) -> Any:
    return evaluation.get("tasks", evaluation.get("trials", "some"))


def _with_interval(evaluation: Mapping[str, Any]) -> str:
    interval = _interval(evaluation)
    return percent(evaluation["success"]) + (f" (95 % interval {interval})" if interval else "")


def _interval(evaluation: Mapping[str, Any]) -> str:
    bounds = evaluation.get("interval")
    if not isinstance(bounds, list | tuple) or len(bounds) != 2 or not all(map(is_number, bounds)):
        return ""
    return " to ".join(map(percent, bounds))


def _took(seconds: Any) -> str:
    return duration(seconds) if is_number(seconds) else "an unknown time"
