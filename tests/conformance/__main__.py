"""What our code uses of other packages, against the official wheels.

Writes docs/notes/conformance.md. Exit code 1 if the pinned versions lack something.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tests.conformance.check import Outcome, changed_defaults, check
from tests.conformance.library import Library
from tests.conformance.uses import collect
from tests.conformance.wheels import PACKAGES, ROOT, fetch, pinned

CACHE = ROOT / ".cache/conformance"
PAGE = ROOT / "docs/notes/conformance.md"
HEAD = """# What newer versions of other packages will break

`python -m tests.conformance` writes this page. It reads the Python files of the wheels, without
installing them, and compares names, signatures, base classes and what stands in for them, flags,
routes and environment variables with what our code uses. Code that is compiled, or makes its names
as it runs, cannot be compared. `tests/test_conformance.py` refuses a pinned version that lacks
something; a newer vLLM than the pinned minor version is refused by name at start.

| package | pinned | newest |
|---|---|---|
"""


def main() -> int:
    argparse.ArgumentParser(prog="python -m tests.conformance", description=__doc__).parse_args()
    installed = fetch(CACHE, pinned())
    newest = fetch(CACHE, dict.fromkeys(PACKAGES))
    now, then = Library(installed.values()), Library(newest.values())
    uses = collect(set(PACKAGES))
    outcomes = {"pinned": check(uses, now), "newest": check(uses, then)}
    defaults = changed_defaults(uses, now, then)
    for name, outcome in outcomes.items():
        print(_summary(name, outcome))
        print(*outcome.faults, sep="\n")
    rows = [f"| {p} | {_version(installed[p])} | {_version(newest[p])} |" for p in PACKAGES]
    text = HEAD + "\n".join(rows) + "\n"
    for name, outcome in outcomes.items():
        text += f"\n## The {name} versions\n\n{_summary(name, outcome)}\n"
        text += "\n" * bool(outcome.faults) + _bullets(outcome.faults)
    text += "\n## Defaults that change\n\nOf arguments that our calls leave out.\n\n"
    text += _bullets(defaults) or "None.\n"
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(text.rstrip() + "\n", encoding="utf-8")
    print(f"written: {PAGE.relative_to(ROOT)}")
    return 1 if outcomes["pinned"].faults else 0


def _summary(name: str, outcome: Outcome) -> str:
    return (
        f"{name}: {outcome.checked} uses, {outcome.unknown} of which cannot be compared; "
        f"{len(outcome.faults)} do not fit."
    )


def _bullets(faults: list[str]) -> str:
    """A list without line numbers, which change with every commit."""
    return "".join(sorted({f"- `{_without_line(fault)}`\n" for fault in faults}))


def _version(folder: Path) -> str:
    return folder.name.rpartition("-")[2]


def _without_line(fault: str) -> str:
    where, _, rest = fault.partition(": ")
    return f"{where.partition(':')[0]}: {rest}"


if __name__ == "__main__":
    sys.exit(main())
