"""The report: one HTML file with the live page's own curves, messages and tokens.

The headline is HTML, so that a preview without scripts shows it; the rest is data that the page's
modules draw. Invariant: the file needs no server and connects to none; the browser runs only the
script whose hash its policy names; the size is bounded, whatever the run.
"""

from __future__ import annotations

import asyncio
import base64
import json
import math
import unicodedata
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from hashlib import sha256
from html import escape
from pathlib import Path
from typing import Any

from proxy.errors import ConfigurationError
from proxy.extras.view.one_script import one_script
from proxy.extras.view.pages import file_text
from proxy.extras.view.run_answers import EvaluationJson, RunJson
from proxy.extras.view.run_folder import RecordedRun
from proxy.rendering.tokenizer import Tokenizer, load_tokenizer
from proxy.run_files.files import replace_file
from proxy.run_files.verdict import VerdictJson, Word
from proxy.store import open_store
from trainer.extras.report.headline import Facts, Headline, headline
from trainer.extras.report.pairs import pairs_json
from trainer.extras.report.series import SeenMetrics, is_number
from trainer.extras.report.transcripts import Transcripts, as_text
from trainer.extras.report.trials import SeenTrials
from trainer.extras.report.troubles import troubles
from trainer.run.folder import RunFolder
from trainer.run.metrics import Transcript

EVALUATIONS = 100
"""Evaluations that are shown: the first ones and the last ones."""
SETTINGS = 2_000
PAIRS = 3
NAME_CHARS = 200


@dataclass(frozen=True, slots=True)
class Report:
    """A written report. Example: Report(Path("runs/a/report.html"), (Transcript(…),))"""

    page: Path
    transcripts: tuple[Transcript, ...]
    """Of the trials that it shows."""


def write_report(folder: RunFolder) -> Report:
    """Writes `report.html`. Reads only the run's folder and the tokenizer."""
    run = RecordedRun(folder.path)
    summary = run.summary()
    settings = summary["config"]
    seen = SeenTrials(folder.trials_log, success_at=_number(settings, "eval.success_at", 1.0))
    metrics = SeenMetrics(folder.metrics)
    count = max(0, int(_number(settings, "logging.report_trials", PAIRS)))
    pairs, note = asyncio.run(_pairs(run, seen, count))
    max_staleness = _number(settings, "rollout.max_staleness", math.inf)
    if not summary["evaluations"] and seen.last is not None:
        summary["evaluations"] = [seen.last.score()]
    evaluations = summary["evaluations"]
    data = {
        "evaluations": _ends(evaluations),
        "evaluations_left_out": max(0, len(evaluations) - EVALUATIONS),
        "curves": {
            "last": metrics.last_step,
            "metrics": {name: list(each.points()) for name, each in metrics.series.items()},
            "left_out": len(metrics.left_out),
        },
        "troubles": troubles(
            folder.path, seen, metrics, summary, max_staleness, lacks_signal=_lacks_signal(summary)
        ),
        "pairs": pairs,
        "pairs_note": note,
        "config": dict(list(settings.items())[:SETTINGS]),
        "config_left_out": max(0, len(settings) - SETTINGS),
    }
    head = headline(Facts(summary, seen, metrics))
    replace_file(folder.report, _html(run.name, summary["status"], head, data))
    shown = {side["trial"]["trial_id"]: side for pair in pairs for side in pair["sides"]}
    return Report(folder.report, tuple(map(as_text, shown.values())))


def _lacks_signal(summary: RunJson) -> bool:
    """Whether steps without a signal went wrong; they did not where the tasks were solved."""
    verdict = summary["verdict"]
    return verdict is None or verdict["verdict"] not in (Word.LEARNING, Word.ALREADY_SOLVED)


async def _pairs(
    run: RecordedRun, seen: SeenTrials, count: int
) -> tuple[list[dict[str, Any]], str]:
    async with AsyncExitStack() as stack:
        browser = None
        if run.sessions.is_file():
            store = await open_store(f"sqlite:///{run.sessions.absolute()}", create=False)
            stack.push_async_callback(store.close)
            browser = store.browser
        return await pairs_json(run, seen, Transcripts(run, browser, _tokenizer(run)), count)


def _tokenizer(run: RecordedRun) -> Tokenizer | None:
    """None if the model is not there any more, or has no fast tokenizer."""
    try:
        return None if run.model is None else load_tokenizer(run.model)
    except ConfigurationError:
        return None


def _html(name: str, status: str | None, head: Headline, data: dict[str, Any]) -> str:
    script, style = one_script("report.js", file_text), file_text("style.css")
    policy = (
        f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(style)}'; "
        "base-uri 'none'; form-action 'none'; require-trusted-types-for 'script'; "
        "trusted-types 'none'"
    )
    tiles = "".join(
        f"<li class=tile><span>{_text(each.label)}</span><strong>{_text(each.value)}</strong>"
        f"<small>{_text(each.note)}</small></li>"
        for each in head.tiles
    )
    sentences = "".join(f"<p>{_text(each)}</p>" for each in head.sentences)
    shown = _text(status or "no status")
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="referrer" content="no-referrer">
<title>{_text(name)}: {_text(head.title)}</title>
<style>{style}</style>
</head>
<body>
<main class="view-report">
<p class="of-run quiet">{head.kind} <bdi>{_text(name)}</bdi>
<span class="tag status-{shown}">{shown}</span></p>
<h1>{_text(head.title)}</h1>
{_verdict(head.verdict)}
<div class="sentences">{sentences}</div>
<ul class="tiles">{tiles}</ul>
<div id="report"><noscript><p>Curves and transcripts need JavaScript, which this file contains:
open it in a browser.</p></noscript></div>
</main>
<script type="application/json" id="report-data">{_json(data)}</script>
<script>{script}</script>
</body>
</html>
"""


def _verdict(verdict: VerdictJson | None) -> str:
    if verdict is None:
        return ""
    word = verdict["verdict"].replace(" ", "-")
    steps = "".join(
        f"<li>{_text(each['what'])}: <code>{_text(each['command'])}</code></li>"
        for each in verdict["next"]
    )
    failures = "".join(
        f"<li>{each['trials']} of {each['of']} trials: {_text(each['cause'])}; the last one is in "
        f"<code>{_text(each['folder'])}</code><pre>{chr(10).join(map(_text, each['lines']))}</pre>"
        "</li>"
        for each in verdict["failures"]
    )
    return (
        f'<section class="verdict verdict-{word}"><p><strong>{_text(verdict["verdict"])}</strong> '
        f"{_text(verdict['sentence'])}</p><p>Cause: {_text(verdict['cause'])}</p>"
        f'<ul class="failures">{failures}</ul><ul class="next">{steps}</ul></section>'
    )


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(sha256(text.encode()).digest()).decode()


def _json(data: Any) -> str:
    """JSON in ASCII that cannot end its script element; NaN and infinity are null."""
    text = json.dumps(_finite(data), allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _finite(data: Any) -> Any:
    if isinstance(data, dict):
        return {str(key): _finite(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_finite(each) for each in data]
    return None if isinstance(data, float) and data - data != 0 else data


_UNSEEN = ("Cc", "Cf", "Cs", "Co")
"""Unicode categories."""


def _text(text: str) -> str:
    """As HTML; characters that have no shape or turn the direction of text are made visible."""
    return escape(
        "".join(
            f"⟨U+{ord(char):04X}⟩" if unicodedata.category(char) in _UNSEEN else char
            for char in text[:2_000]
        )
    )


def _ends(evaluations: list[EvaluationJson]) -> list[EvaluationJson]:
    evaluations = [{**each, "name": each["name"][:NAME_CHARS]} for each in evaluations]
    if len(evaluations) <= EVALUATIONS:
        return evaluations
    return [*evaluations[: EVALUATIONS // 2], *evaluations[-EVALUATIONS // 2 :]]


def _number(settings: Mapping[str, str], key: str, otherwise: float) -> float:
    """A number of the configuration."""
    try:
        found = json.loads(settings.get(key, "null"))
    except ValueError:
        return otherwise
    return found if is_number(found) else otherwise
