"""`agentic-train eval`: success, pass@k and mean reward per source, of a checkpoint or an endpoint.

Nothing is trained. The folder `--out` holds a line per trial, the sessions with their rewards, and
the scores (`summary.json`); the same command continues where it was interrupted.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence

from agent_loop.endpoint_loop import Endpoint
from agent_loop.evaluator import EvalConfig, EvalReport, Score, pass_at_k_intervals, score
from agent_loop.producers.trial_list import TrialLine
from agent_loop.records import Group, Rollout, RolloutStatus, Task
from proxy.records import SessionKind
from trainer.commands.arguments import KEY_VARIABLES
from trainer.commands.runs import reporting
from trainer.commands.sample_trials import TrialRun, run_trials
from trainer.config import TrainerConfig
from trainer.errors import ConfigError
from trainer.run.folder import RunFolder
from trainer.run.log import evaluation_summary
from trainer.settings.sources import load


def main(arguments: argparse.Namespace) -> int:
    """Runs `agentic-train eval`; returns its exit code."""
    return reporting("agentic-train eval", lambda: _evaluate(arguments))


def _evaluate(arguments: argparse.Namespace) -> int:
    config, endpoint = named_model(arguments)
    repeats = arguments.repeats or config.eval.repeats
    limit = arguments.limit or config.eval.limit
    trials = TrialRun(config, arguments.out, "val", repeats, SessionKind.EVAL, endpoint, limit)
    return print_scores(trials, f"trials: {arguments.out}/trials.jsonl", write_summary)


def named_model(arguments: argparse.Namespace) -> tuple[TrainerConfig, Endpoint | None]:
    """The configuration with the checkpoint of `--model`, or the endpoint that it names."""
    words, endpoint = list(arguments.words), None
    if arguments.model is not None and arguments.model.startswith(("http://", "https://")):
        endpoint = _endpoint(arguments)
    elif arguments.model is not None:
        words.append(f"model.path={arguments.model}")
    return load(arguments.config, words, os.environ), endpoint


def print_scores(
    run: TrialRun,
    last_line: str,
    scored: Callable[[TrialRun, Sequence[TrialLine]], None] = lambda *_: None,
) -> int:
    """Runs the trials and prints their scores, after calling `scored`. Returns the exit code."""
    lines, signal_number = run_trials(run)
    if signal_number:
        print(f"interrupted; the same command continues with the trials in {run.folder}")
        return 128 + signal_number
    scored(run, lines)
    print(scores_table(lines, run.config.eval.model_copy(update={"repeats": run.repeats})))
    print(last_line)
    return 0


def write_summary(run: TrialRun, lines: Sequence[TrialLine]) -> None:
    """Writes the scores, also by source and agent, to `summary.json`, which readers open."""
    config, groups = run.config.eval.model_copy(update={"repeats": run.repeats}), groups_of(lines)

    def scores(of: Callable[[Task], str]) -> dict[str, Score]:
        names = sorted({of(group.task) for group in groups} - {""})
        chosen = {name: [g for g in groups if of(g.task) == name] for name in names}
        return {name: score(some, config) for name, some in chosen.items()}

    sources, agents = scores(lambda task: task.source), scores(lambda task: task.agent)
    report = EvalReport(0, score(groups, config), sources, (), agents)
    summary = {"eval": {"evaluation": evaluation_summary(0, report)}}
    RunFolder.open(run.folder).write_summary(summary)


def _endpoint(arguments: argparse.Namespace) -> Endpoint:
    if arguments.model_name is None:
        raise ConfigError(f"--model-name: missing; name the model that {arguments.model} serves")
    names = [arguments.api_key_env] if arguments.api_key_env else KEY_VARIABLES
    keys = [os.environ[name] for name in names if os.environ.get(name)]
    if not keys:
        raise ConfigError(
            f"--api-key-env: {' and '.join(names)} not set; set the endpoint's key in one of them"
        )
    return Endpoint(arguments.model, keys[0], arguments.model_name)


def groups_of(lines: Sequence[TrialLine]) -> list[Group]:
    """The trials by task, in the form that scores are computed from."""
    found: dict[tuple[str, str, str], list[Rollout]] = {}
    for line in lines:
        task = Task(line.task_id, {}, line.source, line.agent)
        rollout = Rollout(
            line.trial_id, task, RolloutStatus(line.status), line.reward, num_turns=line.turns
        )
        found.setdefault(line.key[:3], []).append(rollout)
    return [Group("/".join(key), rollouts[0].task, rollouts) for key, rollouts in found.items()]


def scores_table(lines: Sequence[TrialLine], config: EvalConfig) -> str:
    """One line per source, one per agent if there are several, and one for all; intervals are of
    95 %."""
    groups = groups_of(lines)
    names = sorted({group.task.source for group in groups})
    agents = [f"agent {name}" for name in sorted({g.task.agent for g in groups} - {""})]
    rows = [["source", "tasks", "trials", "failed", "mean reward", "success"]]
    rows[0] += [f"pass@{k}" for k in config.ks]
    for name in [*names, *agents, "all"] if len(names) + len(agents) > 1 else names:
        chosen = [g for g in groups if name in (g.task.source, f"agent {g.task.agent}", "all")]
        result, intervals = score(chosen, config), pass_at_k_intervals(chosen, config)
        rows.append(
            [
                name,
                str(result.tasks),
                str(result.rollouts),
                str(result.failed),
                f"{result.mean_reward:.3f}",
                _with_interval(result.success, result.interval),
                *(_with_interval(result.pass_at_k[k], intervals[k]) for k in config.ks),
            ]
        )
    return aligned(rows)


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """The rows as lines with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def _with_interval(value: float, interval: tuple[float, float]) -> str:
    return f"{value:.3f} [{interval[0]:.3f}, {interval[1]:.3f}]"
