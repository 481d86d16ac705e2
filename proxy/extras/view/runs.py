"""The training runs that the page shows: those of `view` or `serve`, and published ones.

Invariant: a published run's sessions are in the store of the page, as those of the first run are;
any other run has a store of its own, which is only read.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from proxy.errors import ConfigurationError, SessionError
from proxy.extras.view.published_run import PublishedRuns
from proxy.extras.view.run_answers import EndOfRun, RunStamps
from proxy.extras.view.run_folder import RecordedRun
from proxy.extras.view.run_tokens import TrialTokens
from proxy.store.browser import Browser
from proxy.store.sqlite_browser import SqliteBrowser


class RecordedRuns(Mapping[str, RecordedRun]):
    """The runs by name; those that were named at the start come first."""

    def __init__(self, paths: Sequence[Path] = (), published: Path | None = None) -> None:
        """`published`: the folder of published runs.

        Raises:
            ConfigurationError: two folders have one name.
        """
        self._runs: dict[str, RecordedRun] = {}
        for path in paths:
            run = RecordedRun(path)
            if run.name in self._runs:
                raise ConfigurationError(
                    f"{path} and {self._runs[run.name].path} have the same name {run.name!r};"
                    " rename one of the folders, or show one of them"
                )
            self._runs[run.name] = run
        self._first = next(iter(self._runs.values()), None)
        self._published: dict[str, RecordedRun] = {}
        self.published = None if published is None else PublishedRuns(published, self._runs)

    def __getitem__(self, name: str) -> RecordedRun:
        return self._all()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())

    def named(self, name: str) -> RecordedRun:
        """Raises SessionError (404) if the page shows no such run."""
        run = self._all().get(name)
        if run is None:
            raise SessionError(f"there is no run {name[:80]!r}; `view RUN` shows one", status=404)
        return run

    def trained_tokens(self, session_id: str, run: str = "") -> TrialTokens | None:
        """What a trainer knows of a session's tokens, if it trained any: that of `run`, else those
        whose sessions are in the page's store."""
        found = (each.tokens.of(session_id) for each in self.with_session(run))
        return next((tokens for tokens in found if tokens is not None), None)

    def with_session(self, run: str = "") -> list[RecordedRun]:
        """The runs to which a session can belong: `run`, else those whose sessions are in the
        page's store."""
        if run:
            return [self.named(run)]
        return [each for each in self._all().values() if self._here(each)]

    @asynccontextmanager
    async def browser_of(self, run: RecordedRun, first: Browser) -> AsyncIterator[Browser | None]:
        """Reads the sessions of a run; None if it has none of its own. `first` reads the store of
        the page. The store of another run may be in use by another process: it is only read."""
        if self._here(run):
            yield first
        elif run.sessions.is_file():
            browser = SqliteBrowser(run.sessions, None)
            try:
                yield browser
            finally:
                await browser.close()
        else:
            yield None

    def has_model_of_the_page(self, run: RecordedRun) -> bool:
        """Whether the page's tokenizer is that of the run."""
        first = self._first
        return self._here(run) or (first is not None and run.base_model == first.base_model)

    def state(self) -> list[RunStamps]:
        return [run.stamps() for run in self._all().values()]

    def last(self) -> Iterator[tuple[tuple[str, str], float]]:
        """The values of each run's last step, by run and metric, and its tokens so far."""
        for name, run in self._all().items():
            for metric, value in run.last_metrics():
                yield (name, metric), value

    def verdicts(self) -> Iterator[tuple[tuple[str, str], float]]:
        """1 for the run and its verdict, of those that have one."""
        for name, run in self._all().items():
            if (verdict := run.summary()["verdict"]) is not None:
                yield (name, verdict["verdict"]), 1.0

    def ends(self) -> dict[str, EndOfRun]:
        """The runs of this process, for readers whose stream ends."""
        return {name: run.end() for name, run in self._runs.items()}

    def _here(self, run: RecordedRun) -> bool:
        return run is self._first or run.published

    def _all(self) -> dict[str, RecordedRun]:
        if self.published is None:
            return self._runs
        known = self._published
        self._published = {
            name: known.get(name) or RecordedRun(path, published=True)
            for name, path in self.published.paths.items()
        }
        return self._runs | self._published
