"""Evidence: what happened in a session anyway, read as how well the policy did.

A source is a class with a `weight` and a method `judge`. Invariant: a source that cannot tell
yields nothing; no evidence is not evidence of failure.

    evidence:
      - rating
      - {name: tests, weight: 0.5}
      - {name: "my_package.evidence:Deployed"}
"""

from __future__ import annotations

import difflib
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field

from proxy.search.edited_tests import edited_test
from proxy.store.curation import RATING
from trainer.algorithms.part import NamedPart, Parts
from trainer.extras.learn.commands import simple_commands
from trainer.extras.learn.git import Repository
from trainer.extras.learn.seen import Call, Seen


@dataclass(frozen=True, slots=True)
class Finding:
    """Example: Finding(1.0, "tests are green after red"); Finding(-1.0, "invalid call", turn=3)"""

    sign: float
    """From -1, bad, to 1, good."""
    why: str
    turn: int | None = None
    """The turn that it is about; None: all of the session."""
    quoted: str = ""
    """What somebody said, whole: its secrets are masked, then its beginning is shown."""


class Source(NamedPart, ABC):
    """A source of evidence. A subclass declares its settings as fields."""

    decides: ClassVar[bool] = False
    """Whether what it says of a session is final, whatever happened besides."""
    weight: float = Field(1.0, ge=0)
    """Its weight in the sum."""

    @abstractmethod
    def judge(self, seen: Seen) -> Iterator[Finding]:
        """What the session shows."""

    def is_due(self, seen: Seen) -> bool:
        """Whether all is known that the source will know."""
        return True


class Rating(Source):
    """What a person said: the page's buttons, `agentic-proxy sessions rate`. 1 is good, 0 bad. It
    is final: what else there is about the whole session does not count then."""

    name: Literal["rating"] = "rating"
    decides: ClassVar[bool] = True

    def judge(self, seen: Seen) -> Iterator[Finding]:
        for reward in seen.session.rewards:
            if reward.key == RATING and reward.turn is None:
                sign = max(-1.0, min(1.0, 2 * reward.value - 1))
                yield Finding(sign, f"rated {reward.value:g}")


class Rewards(Source):
    """A reward that a program has posted, as of a verifier: 1 is good, 0 bad."""

    name: Literal["reward"] = "reward"
    key: str = "reward"
    """Key of the reward."""

    def judge(self, seen: Seen) -> Iterator[Finding]:
        for reward in seen.session.rewards:
            if reward.key == self.key:
                sign = max(-1.0, min(1.0, 2 * reward.value - 1))
                yield Finding(sign, f"{self.key} {reward.value:g}", reward.turn)


_RUNS_TESTS = (
    r"\b(pytest|unittest|tox|nox|jest|vitest|mocha|ctest|rspec|phpunit|mypy|tsc|ruff check)\b"
    r"|\b(npm|pnpm|yarn|bun)( run)? (test|build|lint)|\b(cargo|go|dotnet|gradle|mvn|swift|mix) "
    r"(test|build|check|verify)|\bmake( \S+)* (test|check|build|all)\b|\bmake$"
)
_READS_OR_INSTALLS = re.compile(
    r"(\w+=\S* )*(sudo |time |env )*(grep|rg|ag|cat|bat|head|tail|less|ls|find|which|type|echo"
    r"|printf|sed|awk|git|cd|man|vim?|nano|mkdir|touch|cp|mv|rm|pip3?|python[\d.]* -m pip"
    r"|uv (pip|add|sync)|(poetry|conda|apt|apt-get|brew|apk) (add|install)"
    r"|(npm|pnpm|yarn|bun) (i|install|add|ci))\b"
)
"""Commands that name a runner and do not run it."""
_EXIT = re.compile(
    r'(?:"(?:return|exit)_?code"\s*:\s*|<(?:return|exit)_?code>\s*'
    r"|^(?:return|exit)[ _-]?code(?:: ?|=| )|^(?:Process )?exited with code )(-?\d+)",
    re.IGNORECASE | re.MULTILINE,
)
"""An exit code as agents write it; not one in the source that a test has printed."""
_RED = re.compile(r"\b[1-9]\d* (failed|errors?|failures?)\b|\bFAILED\b|\berror\[|^E  ")
_GREEN = re.compile(r"\b\d+ passed\b|\bOK\b|\b0 (failed|failures)\b|\bBUILD SUCCESS|no issues")


class RanTests(Source):
    """Tests and builds that the agent ran: green at the end after red is good; red at the end after
    green is bad. Green that comes after a change of the tests shows nothing."""

    name: Literal["tests"] = "tests"
    runs: str = _RUNS_TESTS
    """Regular expression of the commands that test or build."""

    def judge(self, seen: Seen) -> Iterator[Finding]:
        runs = re.compile(self.runs)
        results: list[bool] = []
        changed = None
        for call in seen.calls:
            changed = changed or edited_test(call.name, call.arguments)
            if self._runs(runs, call) and (passed := has_passed(call)) is not None:
                results.append(passed)
        if not results or len(set(results)) < 2:
            return
        if not results[-1]:
            yield Finding(-1.0, "tests or builds ended red after green")
        elif changed is not None:
            yield Finding(0.0, f"tests are green after red, but the agent changed {changed}")
        else:
            yield Finding(1.0, "tests or builds are green after red")

    @staticmethod
    def _runs(runs: re.Pattern[str], call: Call) -> bool:
        return any(
            runs.search(each) and not _READS_OR_INSTALLS.match(each)
            for each in simple_commands(call.command)
        )


def has_passed(call: Call) -> bool | None:
    """Whether a command has succeeded, by its exit code or what it printed; None: not known."""
    if call.result is None:
        return None
    if found := _EXIT.search(call.result):
        return int(found[1]) == 0
    if _RED.search(call.result):
        return False
    return True if _GREEN.search(call.result) else None


class Kept(Source):
    """What became of the session's commits and edits in Git, some time after it: kept, or reverted.
    Reads the repository of the session's folder, on this machine."""

    name: Literal["kept"] = "kept"
    after_s: float = Field(86_400.0, ge=0)
    """Seconds after the session's end at which it is read."""
    least: float = Field(0.5, gt=0, le=1)
    """Share of the added lines that must be there still."""

    def is_due(self, seen: Seen) -> bool:
        return seen.now >= seen.ended_at + self.after_s

    def judge(self, seen: Seen) -> Iterator[Finding]:
        if not self.is_due(seen) or not (repository := Repository.of(seen.folder)):
            return
        if any("git commit" in call.command for call in seen.calls):
            yield from self._commits(seen, repository)
        added = list(_edits(seen))
        if added:
            folder = Path(seen.folder)
            held = [repository.share(folder / path, lines) for path, lines in added]
            known = [share for share in held if share is not None]
            if known and (mean := sum(known) / len(known)) >= self.least:
                yield Finding(1.0, f"{mean:.0%} of its edits are kept in Git")
            elif known:
                yield Finding(-1.0, f"only {mean:.0%} of its edits are kept in Git")

    def _commits(self, seen: Seen, repository: Repository) -> Iterator[Finding]:
        commands = "\n".join(call.command for call in seen.calls)
        made = [
            commit
            for commit, subject in repository.commits(seen.session.created_at, seen.ended_at)
            if subject in commands  # another one is the person's
        ]
        if not made:
            return
        gone = [each for each in made if not repository.keeps(each)]
        if gone:
            yield Finding(-1.0, f"{len(gone)} of {len(made)} commits are reverted or gone")
        else:
            yield Finding(1.0, f"{len(made)} commits are kept")


def _edits(seen: Seen) -> Iterator[tuple[str, list[str]]]:
    """Path and added lines of each edit."""
    for call in seen.calls:
        values = call.values
        path = values.get("file_path") or values.get("path") or values.get("filePath")
        text = next(
            (
                values[name]
                for name in ("new_string", "new_str", "newString", "content", "file_text")
                if isinstance(values.get(name), str)
            ),
            None,
        )
        lines = [line.strip() for line in (text or "").splitlines() if line.strip()]
        if isinstance(path, str) and lines:
            yield path, lines


class Corrections(Source):
    """What the user did in the session: interrupted, corrected, repeated a request, or thanked. It
    is about the answer before."""

    name: Literal["corrections"] = "corrections"
    weight: float = Field(0.5, ge=0)
    bad: str = (
        r"^\[Request interrupted|^(no|nope|stop|wrong|undo|revert)\b|\bthat'?s (not|wrong)\b"
        r"|\b(not what i|i said|i told you|i asked|instead of|don'?t do|why did you)\b"
    )
    """Regular expression of a correction."""
    good: str = r"^(thanks|thank you|perfect|great|nice|excellent|good job|lgtm)\b"
    """Regular expression of praise."""
    alike: float = Field(0.85, gt=0, le=1)
    """Similarity of two requests of which the second repeats the first."""

    def judge(self, seen: Seen) -> Iterator[Finding]:
        bad, good = re.compile(self.bad, re.I), re.compile(self.good, re.I)
        for before, said in zip(seen.said, seen.said[1:], strict=False):
            if said.after is None:
                continue
            if bad.search(said.text):
                yield Finding(-1.0, "corrected", said.after, said.text)
            elif good.search(said.text):
                yield Finding(1.0, "praised", said.after, said.text)
            elif difflib.SequenceMatcher(None, before.text, said.text).ratio() >= self.alike:
                yield Finding(-1.0, "the request was repeated", said.after)


class Failures(Source):
    """Calls that failed by the agent's own fault: no such tool or file, an edit that does not fit,
    one that the user refused, arguments that are not JSON. It is about the call's turn alone."""

    name: Literal["failures"] = "failures"
    weight: float = Field(0.25, ge=0)
    failed: str = (
        r"<tool_use_error>|String to replace not found|[Uu]nknown tool|no tool named|[Ii]nvalid "
        r"(tool|argument|parameter)|InputValidationError|command not found|No such file or "
        r"directory|doesn't want to (proceed|take this action)|patch does not apply"
    )
    """Regular expression of a failed call's result."""

    def judge(self, seen: Seen) -> Iterator[Finding]:
        failed = re.compile(self.failed)
        for call in seen.calls:
            if call.arguments.strip() and not call.values:
                yield Finding(-1.0, f"the arguments of {call.name} are no JSON object", call.turn)
            elif call.result is not None and (found := failed.search(call.result)):
                yield Finding(-1.0, f"{call.name}: {found[0][:40]}", call.turn)


SOURCES = Parts[Source](Source, (Rating, Rewards, RanTests, Kept, Corrections, Failures))
"""Registry of the sources for the key `evidence`."""
RATES_ITSELF = re.compile(r"agentic-proxy\s+sessions\s+(rate|tag)")
"""A command by which an agent would give itself evidence."""
