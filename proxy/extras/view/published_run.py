"""The files of a run that another trainer publishes, by its requests.

Invariant: one request at a time writes to a run, also if several processes serve the page, and each
file keeps its bound.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import yaml

from proxy.errors import RequestError, SessionError, StoreError
from proxy.extras.view.publishing import PublishedSummary, StepTokens
from proxy.extras.view.run_answers import NowJson
from proxy.http.valid_json import write_json
from proxy.machine.secrecy import without_secrets
from proxy.run_files.files import replace_file, truncate_jsonl
from proxy.run_files.json_lines import lines_before
from proxy.run_files.lines import line_of
from proxy.run_files.tokens import PLACES, VALUES, TokenSteps, remove_steps_after

MAX_RUNS = 50
"""The page asks for the state of each of them once per second."""
MAX_FILE_BYTES = 2**30
"""Of the lines of one file: about 3 million trials."""
TOKEN_BYTES = 2**30
"""Of the columns of one run; the oldest steps are removed."""
_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,79}", re.ASCII)


class PublishedRuns:
    """Example: PublishedRuns(Path("published")).begin("grpo-1", {"lr": 1e-5}, None)"""

    def __init__(self, folder: Path, taken: Collection[str] = ()) -> None:
        """`taken`: names of runs that the page shows anyway."""
        self._folder = folder
        self._taken = frozenset(taken)

    @property
    def paths(self) -> dict[str, Path]:
        """The folders of the runs, by name."""
        if not self._folder.is_dir():
            return {}
        found = sorted(self._folder.iterdir())
        return {
            each.name: each
            for each in found
            if _NAME.fullmatch(each.name) and (each / "config.yaml").is_file()
        }

    def begin(self, name: str, config: Mapping[str, Any], last_step: int | None) -> None:
        """Creates a run, or continues it after `last_step`, if it is given.

        Raises:
            RequestError: the name cannot be used, or there are MAX_RUNS runs.
        """
        if not _NAME.fullmatch(name):
            raise RequestError(
                f"name: {name[:80]!r} cannot be used: use 1 to 80 letters, digits and . _ -, the"
                " first a letter or a digit"
            )
        paths = self.paths
        if name in self._taken or (name not in paths and len(paths) >= MAX_RUNS):
            why = (
                "the page shows another run of this name"
                if name in self._taken
                else f"{len(paths)} of {MAX_RUNS} runs are published; remove one with DELETE"
            )
            raise RequestError(f"the run {name!r} cannot be published: {why}", status=409)
        path = self._folder / name
        with _as_store_error(path):
            path.mkdir(parents=True, exist_ok=True)
        PublishedRun(path).begin(config, last_step)

    def run(self, name: str) -> PublishedRun:
        """Raises SessionError (404) if no such run is published."""
        path = self.paths.get(name)
        if path is None:
            raise SessionError(
                f"no run {name[:80]!r} is published; begin it with PUT /view/runs/NAME", status=404
            )
        return PublishedRun(path)


class PublishedRun:
    """The folder of one run. All methods raise StoreError if a file cannot be written."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def begin(self, config: Mapping[str, Any], last_step: int | None) -> None:
        """Writes the configuration, without secrets. Removes what was published of the steps after
        `last_step`, if it is given."""
        with self._alone():
            if last_step is not None:
                for name in ("metrics", "trials", "phases"):
                    if (file := self._path / f"{name}.jsonl").is_file():
                        truncate_jsonl(file, last_step)
                remove_steps_after(last_step, self._path / "tokens")
            text = yaml.safe_dump(without_secrets(dict(config)), allow_unicode=True)
            replace_file(self._path / "config.yaml", text)

    def append(self, name: str, lines: Sequence[Mapping[str, Any]], at: int | None) -> int:
        """Appends lines to `NAME.jsonl`; returns the file's size, with which the next ones go on.

        Raises:
            RequestError: `at` is not the size of the file (409), so that these lines, or others,
                were already appended; or the file is full (413), or a step is before the last
                one's (400).
        """
        path = self._path / f"{name}.jsonl"
        new = "".join(map(line_of, lines)).encode()
        with self._alone():
            size = path.stat().st_size if path.is_file() else 0
            if at is not None and at != size:
                raise RequestError(
                    f"{path.name} has {size} bytes, not at={at}: go on from there, without what was"
                    " already published",
                    status=409,
                )
            if size + len(new) > MAX_FILE_BYTES:
                raise RequestError(
                    f"{path.name} has {size} bytes, and with these lines it would exceed"
                    f" {MAX_FILE_BYTES}; publish fewer lines, or begin another run",
                    status=413,
                )
            _check_order(path, lines)
            with path.open("ab") as file:
                try:
                    file.write(new)
                    file.flush()
                except OSError:
                    os.ftruncate(file.fileno(), size)
                    raise
        return size + len(new)

    def write_tokens(self, tokens: StepTokens) -> None:
        """Raises RequestError for columns that do not fit each other."""
        columns = _columns(tokens)
        with self._alone():
            folder = self._path / "tokens"
            remove_steps_after(2**31, folder)  # what a killed process left of a step
            steps = TokenSteps(folder, TOKEN_BYTES)
            steps.write(tokens["step"], tokens["trials"], tokens["starts"], columns)

    def write_summary(self, summary: PublishedSummary) -> None:
        """A run that has ended does nothing now."""
        with self._alone():
            replace_file(self._path / "summary.json", write_json(summary).decode() + "\n")
            if summary["status"] != "running":
                (self._path / "now.json").unlink(missing_ok=True)

    def write_now(self, now: NowJson) -> None:
        with self._alone():
            replace_file(self._path / "now.json", write_json(now).decode())

    def remove(self) -> None:
        """Removes the run with everything that was published of it."""
        with self._alone():
            (self._path / "config.yaml").unlink(missing_ok=True)
            shutil.rmtree(self._path)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Waits for the other requests that write to this run."""
        with (
            _as_store_error(self._path),
            (self._path / ".publishing").open("w", encoding="utf-8") as file,
        ):
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


@contextmanager
def _as_store_error(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StoreError(
            f"{path}: the published run cannot be written ({error.strerror}); make room or check"
            " the folder published_runs, and send the request again"
        ) from error


def _check_order(path: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    """The page finds the lines of a step by bisection."""
    last, _ = lines_before(path, None, lambda _: True, 1)
    before = last[0][1].get("step", 0) if last else 0
    for line in lines:
        if line["step"] < before:
            raise RequestError(
                f"step: {line['step']} comes after step {before} in {path.name}, but steps must not"
                " decrease; to repeat steps, begin the run again with last_step"
            )
        before = line["step"]


def _columns(tokens: StepTokens) -> dict[str, npt.NDArray[Any]]:
    body: Mapping[str, Any] = tokens
    starts = np.array(tokens["starts"], np.int64)
    places = {name: np.array(body[name], np.int32) for name in PLACES}
    count = len(places["turns"])
    if len(set(tokens["trials"])) != len(tokens["trials"]):
        raise RequestError("trials: a trial is there twice; give all of its tokens at one place")
    if len(starts) != len(tokens["trials"]) + 1 or starts[0] or starts[-1] != count:
        raise RequestError(
            f"starts: must have one entry more than trials ({len(tokens['trials'])}), from 0 to the"
            f" number of tokens ({count})"
        )
    given = {name: body[name] for name in VALUES if name in body}
    lengths = {name: len(column) for name, column in {**places, **given}.items()}
    if set(lengths.values()) != {count}:
        raise RequestError(f"columns: all must have the same length, not {lengths}")
    key = places["turns"].astype(np.int64) * 2**32 + places["positions"]
    ascending = np.diff(key, prepend=-1) > 0
    ascending[starts[:-1][starts[:-1] < count]] = True
    if (np.diff(starts) < 0).any() or not ascending.all():
        raise RequestError(
            "turns, positions: the tokens of a trial must be in the order of turns and positions,"
            " each once, and starts must not decrease"
        )
    types = {name: bool if name == "trained" else np.float32 for name in VALUES}
    return places | {name: np.array(column, types[name]) for name, column in given.items()}
