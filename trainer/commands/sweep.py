"""`agentic-train sweep`: one configuration with several values of some keys, one run after another.

    agentic-train sweep --config agentic_trainer.yaml --out sweeps/lr \\
        seed=0..4 optimizer.lr=1e-4,5e-4

Each combination is a run of its own in `--out`, as `agentic-train` alone would do it. The same
command goes on where it was interrupted: runs that are done stay, one that was interrupted is
resumed. Runs that differ in their seed only are one row of the table at the end. With `--ray`, Ray
Tune runs them on a cluster, whose nodes all see `--out`.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

from proxy.errors import ConfigurationError
from proxy.run_files.intervals import change_of_means, mean_interval, wilson_interval
from proxy.settings.late_section import load_extra
from trainer.commands.eval import aligned
from trainer.commands.runs import reporting
from trainer.errors import ConfigError
from trainer.run.folder import RunFolder

SEED = "trainer.seed"
SHORT = {"seed": SEED}
MOST_RUNS = 1000
_RANGE = re.compile(r"(-?\d+)\.\.(-?\d+)")
_NOT_IN_NAMES = re.compile(r"[^\w.,=+-]+")
Run = Callable[[Sequence[str]], int]
"""Runs `agentic-train` with these arguments; returns its exit code."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One run of the sweep. Example: Trial("lr=1e-4,seed=0", {"optimizer.lr": "1e-4", …})"""

    name: str
    values: Mapping[str, str]
    """The keys with several values → the run's."""

    @property
    def setting(self) -> tuple[tuple[str, str], ...]:
        """Its values besides the seed."""
        return tuple((key, value) for key, value in self.values.items() if key != SEED)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run's folder says. Example: Outcome("done", 0.14, 0.98, 64)"""

    status: str
    before: float | None = None
    """Held-out success, or without held-out tasks None."""
    after: float | None = None
    tasks: int = 0


def main(arguments: argparse.Namespace) -> int:
    """Runs `agentic-train sweep`; returns its exit code."""
    return reporting("agentic-train sweep", lambda: sweep(arguments, _own_process))


def sweep(arguments: argparse.Namespace, run: Run) -> int:
    """Runs what is not done yet, and prints the table. Returns the exit code: 1 if a run failed,
    that of the run if it was interrupted.

    Raises ConfigError as `trials_of`.
    """
    trials, fixed = trials_of(arguments.words)
    given = [word for path in arguments.config for word in ("--config", str(path))]
    arguments.out.mkdir(parents=True, exist_ok=True)
    wanted: dict[str, Sequence[str]] = {}
    for trial in trials:
        folder = arguments.out / trial.name
        if outcome_of(folder).status == "done":
            continue
        if (folder / "config.yaml").is_file():
            wanted[trial.name] = ["resume", str(folder)]
        else:
            own = [f"{key}={value}" for key, value in trial.values.items()]
            wanted[trial.name] = [*given, *fixed, *own, f"trainer.run_dir={folder}"]
    code = _on_ray(wanted, arguments) if arguments.ray else _in_turn(trials, wanted, run)
    if code:
        print(f"interrupted; the same command continues with the runs in {arguments.out}")
        return code
    outcomes = {trial.name: outcome_of(arguments.out / trial.name) for trial in trials}
    print(table(trials, outcomes))
    return int(any(outcome.status != "done" for outcome in outcomes.values()))


def _in_turn(trials: Sequence[Trial], wanted: Mapping[str, Sequence[str]], run: Run) -> int:
    """Returns 0, or the exit code of a run that was interrupted."""
    for number, trial in enumerate(trials, 1):
        if trial.name not in wanted:
            continue
        print(f"[{number}/{len(trials)}] {trial.name}", flush=True)
        code = run(wanted[trial.name])
        if code >= 128 or code < 0:
            return code if code > 0 else 128 - code
    return 0


def _on_ray(wanted: Mapping[str, Sequence[str]], arguments: argparse.Namespace) -> int:
    """Returns 0, or as `_in_turn`. Raises ConfigError."""
    if not wanted:
        return 0
    try:
        run_all = load_extra("trainer.extras.ray.sweep:run_all")
    except ConfigurationError as error:
        raise ConfigError(f"--ray needs Ray Tune ({error}): pip install 'ray[tune]'") from error
    code: int = run_all(
        {arguments.out / name: words for name, words in wanted.items()},
        address=arguments.ray,
        cpus=arguments.cpus,
        gpus=arguments.gpus,
        scheduler=arguments.scheduler,
        grace_steps=arguments.grace,
        say=partial(print, flush=True),
    )
    return code


def _own_process(words: Sequence[str]) -> int:
    """Ctrl-C reaches the run itself, which saves and ends."""
    process = subprocess.Popen([sys.executable, "-m", "trainer.cli", *words])
    while True:
        try:
            return process.wait()
        except KeyboardInterrupt:
            continue


def trials_of(words: Sequence[str]) -> tuple[list[Trial], list[str]]:
    """The runs of the sweep, seeds last; and the words with one value, as they are.

    Raises ConfigError: no key has several values, or too many combinations.
    """
    varied: dict[str, list[str]] = {}
    fixed = []
    for word in words:
        key, equals, text = word.partition("=")
        if not equals:
            raise ConfigError(f"{word!r}: expected key=value, key=value,value or key=0..4")
        key = SHORT.get(key, key)
        if key == "trainer.run_dir":
            raise ConfigError("trainer.run_dir: each run has a folder of its own in --out")
        values = _values(text)
        if len(values) > 1:
            varied[key] = values
        else:
            fixed.append(f"{key}={text}")
    if not varied:
        raise ConfigError(
            "no key has several values; give some, like seed=0..4 or optimizer.lr=1e-4,5e-4"
        )
    keys = sorted(varied, key=lambda key: key == SEED)
    lasts = [key.rpartition(".")[2] for key in keys]
    short = {
        key: last if lasts.count(last) == 1 else key for key, last in zip(keys, lasts, strict=True)
    }
    found: list[Trial] = []
    for each in product(*(varied[key] for key in keys)):
        if len(found) == MOST_RUNS:
            raise ConfigError(f"more than {MOST_RUNS} runs; give fewer values")
        own = dict(zip(keys, each, strict=True))
        name = ",".join(f"{short[key]}={value}" for key, value in own.items())
        found.append(Trial(_folder_name(name), own))
    if len({trial.name for trial in found}) < len(found):
        raise ConfigError("a key has the same value twice, or two that name the same folder")
    return found, fixed


def _values(text: str) -> list[str]:
    """Of `0..4` five, of `a,b` two, of `[a,b]` or "a,b" in quotes one."""
    if ends := _RANGE.fullmatch(text):
        first, last = map(int, ends.groups())
        if last - first >= MOST_RUNS:
            raise ConfigError(f"{text}: more than {MOST_RUNS} runs; give fewer values")
        return [str(number) for number in range(first, last + 1)] or [text]
    return list(_parts(text))


def _parts(text: str) -> Iterator[str]:
    depth, quote, part = 0, "", ""
    for char in text:
        if quote:
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        elif char in "[{":
            depth += 1
        elif char in "]}":
            depth -= 1
        elif char == "," and not depth:
            yield part
            part = ""
            continue
        part += char
    yield part


def _folder_name(name: str) -> str:
    return _NOT_IN_NAMES.sub("-", name).strip("-.,") or "run"


def outcome_of(path: Path) -> Outcome:
    """How far the run in the folder is; `missing` without one."""
    if not (path / "config.yaml").is_file():
        return Outcome("missing")
    summary: dict[str, Any] = RunFolder(path).read_summary()
    evaluated = summary.get("eval", {})
    before, after = evaluated.get("before"), evaluated.get("after")
    return Outcome(
        summary.get("status", "unknown"),
        before and before["success"],
        after and after["success"],
        after["tasks"] if after else 0,
    )


def table(trials: Sequence[Trial], outcomes: Mapping[str, Outcome]) -> str:
    """A row for each setting: held-out success over its seeds, with a 95 % interval of the mean
    (of one run: of its tasks), and the difference to the first setting."""
    settings: dict[tuple[tuple[str, str], ...], list[Outcome]] = {}
    for trial in trials:
        settings.setdefault(trial.setting, []).append(outcomes[trial.name])
    rows = [["setting", "runs", "before", "after [95 %]", "difference [95 %]", "not done"]]
    first: list[float] | None = None
    for setting, found in settings.items():
        done = [each for each in found if each.status == "done" and each.after is not None]
        after = [each.after for each in done if each.after is not None]
        before = [each.before for each in done if each.before is not None]
        first = after if first is None else first
        rows.append(
            [
                " ".join(f"{key.rpartition('.')[2]}={value}" for key, value in setting) or "all",
                str(len(found)),
                f"{fmean(before):.3f}" if before else "",
                _with_interval(after, done[0].tasks) if done else "",
                "" if after is first else _difference(first, after),
                str(sum(each.status != "done" for each in found) or ""),
            ]
        )
    return aligned(rows)


def _with_interval(values: Sequence[float], tasks: int) -> str:
    mean = fmean(values)
    low, high = mean_interval(values) if len(values) > 1 else wilson_interval(mean, tasks)
    return f"{mean:.3f} [{max(low, 0):.3f}, {min(high, 1):.3f}]"


def _difference(first: Sequence[float], other: Sequence[float]) -> str:
    if len(first) < 2 or len(other) < 2:
        return ""
    change, (low, high) = change_of_means(first, other)
    return f"{change:+.3f} [{low:+.3f}, {high:+.3f}]"
