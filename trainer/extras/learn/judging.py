"""A session and its evidence → a value per turn, or the reason why it teaches nothing.

Invariant: a turn's value is within [-1, 1]; a turn without evidence has none. A session that a
search rule has marked, or in which the agent gave itself evidence, teaches nothing good: its value
is at most 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from proxy.extras.secrets import Known, SessionSecrets
from proxy.store.curation import MAX_VALUE_CHARS
from trainer.extras.learn.evidence import RATES_ITSELF, Finding, Source
from trainer.extras.learn.seen import Seen

ROUNDING = 1e-9
QUOTED_CHARS = 40
"""Of what somebody said, as it is shown."""


@dataclass(frozen=True, slots=True)
class Judged:
    """Example: Judged("s-1", 1.0, {0: 1.0, 1: 0.75}, ({"source": "rating", "sign": 1.0, …},))"""

    session_id: str
    value: float
    """Of the whole session: the weighted sum of what is about all of it, within [-1, 1]."""
    turns: Mapping[int, float] = field(default_factory=dict)
    """Turn → its value, for the turns that have one."""
    findings: tuple[dict[str, Any], ...] = ()
    """Each with `source`, `weight`, `sign`, `why` and `turn`."""
    barred: str = ""
    """Why its evidence cannot be good; empty: it can."""

    @property
    def trains(self) -> bool:
        return bool(self.turns)

    @property
    def text(self) -> str:
        """What the page shows. Example: `+1.00: rated 1 (rating +1.00)`"""
        listed = "; ".join(
            f"{each['why']} ({each['source']} {each['sign'] * each['weight']:+.2f}"
            + (f", turn {each['turn']})" if each["turn"] is not None else ")")
            for each in self.findings
        )
        bar = f" [{self.barred}]" if self.barred else ""
        if not self.trains:
            return f"not trained: {listed or 'no evidence'}{bar}"[:MAX_VALUE_CHARS]
        return f"{self.value:+.2f}: {listed}{bar}"[:MAX_VALUE_CHARS]


def judged(seen: Seen, sources: Sequence[Source]) -> Judged:
    """What the sources say of a session."""
    found = [(source, finding) for source in sources for finding in source.judge(seen)]
    barred = _barred(seen)
    if barred:
        found = [(source, each) for source, each in found if each.sign <= 0]
    of_all = [(source, finding) for source, finding in found if finding.turn is None]
    final = [(source, finding) for source, finding in of_all if source.decides and finding.sign]
    value = _within(sum(s.weight * f.sign for s, f in final or of_all))
    own: dict[int, float] = {}
    for source, finding in found:
        if finding.turn is not None:
            own[finding.turn] = own.get(finding.turn, 0.0) + source.weight * finding.sign
    turns = {
        turn.index: credited
        for turn in seen.turns
        if turn.sampled and abs(credited := _within(value + own.get(turn.index, 0.0))) > ROUNDING
    }
    secrets = SessionSecrets(None)
    if found:
        secrets.add_session(seen.session)
        secrets.add(seen.turns)
    findings = tuple(_line(source, finding, secrets.known) for source, finding in found)
    return Judged(seen.session.session_id, value, turns, findings, barred)


def is_due(seen: Seen, sources: Sequence[Source]) -> bool:
    """Whether no source will know more later, or what one says is final already."""
    return all(source.is_due(seen) for source in sources) or any(
        finding.sign and finding.turn is None
        for source in sources
        if source.decides
        for finding in source.judge(seen)
    )


def _barred(seen: Seen) -> str:
    if seen.session.marks:
        return f"search rule {seen.session.marks[0].rule} marked it"
    if any(RATES_ITSELF.search(call.command) for call in seen.calls):
        return "the agent rated or tagged its own session"
    return ""


def _within(value: float) -> float:
    return max(-1.0, min(1.0, value))


def _line(source: Source, finding: Finding, secrets: Known) -> dict[str, Any]:
    why = secrets.mask(finding.why)
    if finding.quoted:  # masked whole: a part of a secret is not known as one
        secrets.learn(finding.quoted)
        why += f": {secrets.mask(finding.quoted)[:QUOTED_CHARS]!r}"
    line = {"source": source.name, "weight": source.weight, "sign": finding.sign}
    return {**line, "why": why, "turn": finding.turn}
