"""What `python -m benchmarks.gpu` has found so far: `results.json`, `results.md` and `logs.tar.gz`.

Invariant: each part has at most one row, written when the part has ended. All three are replaced
atomically, so a stopped benchmark goes on from them.
"""

from __future__ import annotations

import json
import os
import re
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from proxy.run_files.files import read_jsonl, replace_file

FIGURES = {
    "mismatch": ("mismatch/logp_abs_mean", "{:.1e}"),
    "probe": ("sync/probe_abs_mean", "{:.1e}"),
    "paused": ("sync/paused_s", "{:.3f} s"),
    "update": ("sync/total_s", "{:.3f} s"),
    "step": ("time/step_s", "{:.1f} s"),
    "tokens/s": ("throughput/tokens_per_s", "{:.0f}"),
}
"""Column → the metric of a run, and how it is shown: the mean of all steps after the first."""
SHOWN = {
    "first step": "{:.0f} s",
    **{name: form for name, (_, form) in FIGURES.items()},
    "peak": "{:.1f} GiB",
    "plan": "{:.1f} GiB",
}
CURVE = {
    "reward": ("reward/mean", "{:.3f}"),
    "mismatch": ("mismatch/logp_abs_mean", "{:.1e}"),
    "seconds": ("time/step_s", "{:.1f}"),
}
LOGS = {".log", ".txt", ".json", ".jsonl", ".md", ".yaml"}
PLAN = re.compile(r"rank 0[^,+]*, ([\d.]+) GiB")


class Record:
    """Example: Record(Path("runs/bench-gpu"), "NVIDIA H200, torch 2.13.0", rehearsal=False)"""

    def __init__(
        self, folder: Path, machine: str, *, rehearsal: bool, order: Sequence[str] = ()
    ) -> None:
        """`order`: the names of all parts, in the order of the page.

        Raises SystemExit if the folder has the results of another machine, or of a rehearsal."""
        self.folder = folder
        self.file = folder / "results.json"
        self.page = folder / "results.md"
        self.archive = folder / "logs.tar.gz"
        self.order = order
        about = {"machine": machine, "rehearsal": rehearsal}
        self.rows: dict[str, dict[str, Any]] = {}
        if self.file.exists():
            found = json.loads(self.file.read_text(encoding="utf-8"))
            self.rows = found.pop("parts")
            if found != about:
                raise SystemExit(f"{folder} has results of {found}, and this is {about}; set --out")
        self.about = about

    def keep(self, name: str, row: Mapping[str, Any]) -> None:
        """Writes the row of a part, its page and the archive of all logs."""
        rows = {**self.rows, name: dict(row)}
        known = [each for each in self.order if each in rows]
        self.rows = {each: rows[each] for each in dict.fromkeys([*known, *rows])}
        text = json.dumps({**self.about, "parts": self.rows}, indent=1, ensure_ascii=False)
        replace_file(self.file, text + "\n")
        replace_file(self.page, self.text())
        temporary = self.archive.with_name(f".{self.archive.name}.{os.getpid()}")
        with tarfile.open(temporary, "w:gz") as archive:
            for path in sorted(self.folder.rglob("*")):
                if path.suffix in LOGS and path.is_file() and not path.name.startswith("."):
                    archive.add(path, path.relative_to(self.folder))
        temporary.replace(self.archive)

    def text(self) -> str:
        """The page: a row for each part, then what each part itself has to show."""
        what = "a rehearsal, which says nothing about a GPU: " if self.about["rehearsal"] else ""
        lines = [f"# On {what}{self.about['machine']}", "", *heading()]
        lines += [line(name, row) for name, row in self.rows.items()]
        for name, row in self.rows.items():
            shown = [*_curve(row.get("curve", [])), *row.get("table", [])]
            if shown:
                lines += ["", f"## {name}", "", *shown]
        return "\n".join(lines) + "\n"


def heading() -> list[str]:
    """The first two lines of the table of all parts."""
    columns = ("part", "result", "seconds", *SHOWN)
    return [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]


def line(name: str, row: Mapping[str, Any]) -> str:
    figures = row.get("figures", {})
    shown = [form.format(figures[key]) if key in figures else "" for key, form in SHOWN.items()]
    return f"| {name} | {row['result']} | {row['seconds']:.0f} | {' | '.join(shown)} |"


def figures(run: Path, log: str, began_at: float) -> dict[str, Any]:
    """What a training run recorded, also if it did not end well: `figures` and `curve`.

    `began_at`: when its command was started, as `time.time()`.
    """
    steps = [each for each in read_jsonl(run / "metrics.jsonl") if "time/step_s" in each]
    found: dict[str, float] = {}
    if steps:
        found["first step"] = steps[0]["time"] - began_at
    for name, (metric, _) in FIGURES.items():
        values = [each[metric] for each in steps[1:] if metric in each]
        if values:
            found[name] = mean(values)
    peaks = [each["memory/peak_gib"] for each in steps if "memory/peak_gib" in each]
    if peaks:
        found["peak"] = max(peaks)
    if plan := PLAN.search(log):
        found["plan"] = float(plan[1])
    names = {name: metric for name, (metric, _) in CURVE.items()}
    curve = [
        {"step": each["step"], **{n: each[m] for n, m in names.items() if m in each}}
        for each in steps
    ]
    return {"figures": found, "curve": curve}


def _curve(steps: list[dict[str, float]]) -> Iterator[str]:
    if steps:
        yield f"| step | {' | '.join(CURVE)} |"
        yield "|---" * (1 + len(CURVE)) + "|"
    for each in steps:
        shown = [form.format(each[n]) if n in each else "" for n, (_, form) in CURVE.items()]
        yield f"| {each['step']} | {' | '.join(shown)} |"
