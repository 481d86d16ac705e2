"""The report: one self-contained HTML file with curves, evaluations, and trials to read."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import yaml

from proxy.shown_config import without_secrets
from proxy.store import open_store
from trainer.report.plot import histogram, line_plot
from trainer.report.transcript import TextPiece, transcript
from trainer.run.folder import RunFolder, read_jsonl, replace_file
from trainer.run.metrics import Transcript

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 1340px; padding: 0 1rem;
       color: #1f2937; background: #fff }
h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin-top: 2rem }
table { border-collapse: collapse } td, th { padding: .25rem .8rem; text-align: right;
       border-bottom: 1px solid #e5e7eb } td:first-child, th:first-child { text-align: left }
svg { margin: 0 .4rem .4rem 0; max-width: 100% } svg text { font: 11px system-ui, sans-serif;
       fill: #6b7280 } svg .title { font-size: 13px; fill: #1f2937 }
svg .line { fill: none; stroke-width: 1.6 } svg .frame { fill: #f9fafb; stroke: #e5e7eb }
pre { white-space: pre-wrap; overflow-wrap: anywhere; background: #f9fafb; padding: .8rem;
      border: 1px solid #e5e7eb; font-size: 12.5px } .s { background: #dcfce7 }
summary { cursor: pointer }
"""

PLOTS: tuple[tuple[str, dict[str, str]], ...] = (
    ("Reward", {"mean": "reward/mean"}),
    ("Success", {"training": "rollout/success", "held out": "eval/success"}),
    ("Mismatch: mean |Δ log p|, trainer against engine", {"": "mismatch/logp_abs_mean"}),
    ("Mismatch: k3", {"": "mismatch/k3"}),
    ("Effective sample size", {"": "mismatch/ess"}),
    ("Entropy", {"": "actor/entropy"}),
    ("KL to the reference", {"": "kl/reference"}),
    ("Clipped share of tokens", {"": "actor/clip_fraction"}),
    ("Gradient norm", {"": "actor/grad_norm"}),
    ("Loss", {"": "actor/policy_loss"}),
    ("Loss of imitation", {"training": "sft/loss", "held out": "sft/held_out_loss"}),
    ("Gradient norm of imitation", {"": "sft/grad_norm"}),
    ("Staleness (updates)", {"mean": "staleness/mean", "max": "staleness/max"}),
    ("Tokens per second", {"all": "throughput/tokens_per_s", "training": "throughput/train"}),
    (
        "Seconds per step",
        {
            "step": "time/step_s",
            "sampling": "time/sample_s",
            "training": "time/train_s",
            "weights": "time/sync_s",
        },
    ),
    ("Steps in a row without a signal", {"": "signal/steps_without"}),
    ("Turns per trial", {"": "rollout/turns"}),
    ("Share of rollouts", {"failed": "rollout/failed", "truncated": "rollout/truncated"}),
)
"""Each plot's title, and for each of its lines the name and the metric. A plot without points is
left out."""
NO_SESSION = "The session is no longer in sessions.db."


@dataclass(frozen=True, slots=True)
class Report:
    """A written report. Example: Report(Path("runs/a/report.html"), (Transcript(…),))"""

    page: Path
    transcripts: tuple[Transcript, ...]
    """Of the trials that it shows in full."""


def write_report(folder: RunFolder) -> Report:
    """Writes `report.html`. Reads only the run's folder and the tokenizer."""
    config = yaml.safe_load(folder.config.read_text())
    steps = list(read_jsonl(folder.metrics))
    trials = list(read_jsonl(folder.trials_log))
    summary = folder.read_summary()
    shown = _chosen(trials, int(config["logging"]["report_trials"]))
    texts = asyncio.run(_transcripts(folder, shown, Path(config["model"]["path"])))
    shown_settings = yaml.safe_dump(without_secrets(config), sort_keys=False)
    body = [
        f"<h1>{escape(folder.path.name)}</h1>",
        _summary_table(summary),
        _signal(steps),
        "<h2>Evaluation on held-out tasks</h2>",
        _evaluation(summary),
        "<h2>Curves</h2>",
        _plots(steps),
        "<h2>Trials to read</h2>",
        "<p>Exactly what the engine saw; <span class=s>green</span> was sampled by the policy.</p>",
        *[_trial(trial, texts[trial["trial_id"]]) for trial in shown],
        "<h2>Configuration</h2>",
        f"<details><summary>config.yaml</summary><pre>{escape(shown_settings)}</pre></details>",
    ]
    head = f"<!doctype html><meta charset=utf-8><title>{escape(folder.path.name)}</title>"
    replace_file(folder.report, f"{head}<style>{STYLE}</style>\n" + "\n".join(body) + "\n")
    transcripts = tuple(_transcript(trial, texts[trial["trial_id"]]) for trial in shown)
    return Report(folder.report, transcripts)


def _summary_table(summary: Mapping[str, Any]) -> str:
    names = ("status", "steps", "policy_version", "wall_s", "tokens_sampled", "tokens_trained")
    rows = [(name, summary[name]) for name in names if name in summary]
    return _table(("", ""), [(name, _shown(value)) for name, value in rows]) if rows else ""


def _signal(steps: Sequence[Mapping[str, Any]]) -> str:
    """A warning if steps had nothing to learn from."""
    trained = [line for line in steps if "signal/steps_without" in line]
    without = sum(line["signal/steps_without"] > 0 for line in trained)
    if not without:
        return ""
    return (
        f"<p><b>{without} of {len(trained)} steps had no signal</b>: the rewards that are compared "
        "were equal, so every advantage was 0 and nothing was learnt.</p>"
    )


def _evaluation(summary: Mapping[str, Any]) -> str:
    rows = []
    for when, result in summary.get("eval", {}).items():
        numbers = [_shown(result.get(name)) for name in ("reward", "trials", "failed")]
        rows.append((when, _shown(result.get("success")), _interval(result), *numbers))
    if not rows:
        return "<p>There was no evaluation.</p>"
    return _table(("", "success", "95 %", "mean reward", "trials", "failed"), rows)


def _interval(result: Mapping[str, Any]) -> str:
    return " to ".join(f"{bound:.2f}" for bound in result.get("interval", ())) or "-"


def _plots(steps: Sequence[Mapping[str, Any]]) -> str:
    plots = []
    for title, lines in PLOTS:
        series = {name: _points(steps, metric) for name, metric in lines.items()}
        series = {name: points for name, points in series.items() if points}
        plots.append(line_plot(title, series, markers="held out" in series))
    plots.append(histogram("Staleness of trained tokens (updates)", _staleness(steps)))
    return "".join(plots)


def _points(steps: Sequence[Mapping[str, Any]], metric: str) -> list[tuple[float, float]]:
    return [(line["step"], line[metric]) for line in steps if line.get(metric) is not None]


def _staleness(steps: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Staleness → number of trained tokens, over all steps."""
    counts: dict[str, float] = {}
    for line in steps:
        for name, value in line.items():
            if name.startswith("staleness/tokens_at_"):
                age = name.removeprefix("staleness/tokens_at_")
                counts[age] = counts.get(age, 0.0) + value
    return dict(sorted(counts.items(), key=lambda item: int(item[0])))


def _chosen(trials: Sequence[Mapping[str, Any]], count: int) -> list[Mapping[str, Any]]:
    """The worst and the best trial of the first and of the last evaluation, for comparison; then
    the latest trials."""
    scored = [trial for trial in trials if trial.get("reward") is not None and trial["turns"]]
    held_out = [trial for trial in scored if trial["kind"] == "eval"]
    wanted: list[Mapping[str, Any]] = []
    if held_out:
        first, last = held_out[0]["step"], held_out[-1]["step"]
        wanted.append(min((t for t in held_out if t["step"] == first), key=lambda t: t["reward"]))
        same_task = [
            t
            for t in held_out
            if t["step"] == last and t["task_id"] == wanted[0]["task_id"] and t is not wanted[0]
        ]
        wanted += same_task[:1]
        wanted.append(max((t for t in held_out if t["step"] == last), key=lambda t: t["reward"]))
    wanted += reversed(scored)
    unique = {trial["trial_id"]: trial for trial in wanted}
    return list(unique.values())[:count]


async def _transcripts(
    folder: RunFolder, trials: Sequence[Mapping[str, Any]], model: Path
) -> dict[str, list[TextPiece]]:
    if not folder.sessions.is_file():
        return {trial["trial_id"]: [] for trial in trials}
    store = await open_store(f"sqlite:///{folder.sessions}")
    try:
        return {
            trial["trial_id"]: transcript(await store.get_turns(trial["trial_id"]), model)
            for trial in trials
        }
    finally:
        await store.close()


def _transcript(trial: Mapping[str, Any], pieces: Sequence[TextPiece]) -> Transcript:
    text = "".join(piece.text for piece in pieces) or NO_SESSION
    return Transcript(trial["trial_id"], _facts(trial), text)


def _facts(trial: Mapping[str, Any]) -> str:
    return (
        f"{trial['task_id']} · {trial['kind']} at step {trial['step']} · reward "
        f"{_shown(trial['reward'])} · {trial['turns']} turns · {trial['sampled_tokens']} tokens "
        f"sampled · {trial['status']}"
    )


def _trial(trial: Mapping[str, Any], pieces: Sequence[TextPiece]) -> str:
    text = "".join(
        f"<span class=s>{escape(p.text)}</span>" if p.sampled else escape(p.text) for p in pieces
    )
    text = text or NO_SESSION
    return f"<details open><summary>{escape(_facts(trial))}</summary><pre>{text}</pre></details>"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    lines = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f"<table><tr>{top}</tr>{lines}</table>"


def _shown(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, float) else "-" if value is None else str(value)
