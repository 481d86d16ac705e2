"""The census as a table: one line per agent, one result per family."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from tests.e2e.agents.census.agents import Agent
from tests.e2e.agents.census.families import FAMILIES
from tests.e2e.agents.census.run import Row

_HEAD = (
    "| agent | version | families | tools offered | driven | turns | paths | needless forks | "
    "refused | arguments changed | failures | other forks |\n" + "|---" * 12 + "|"
)


def load_rows(folder: Path) -> list[Row]:
    """The results in `folder`, in the order of agents and families."""
    return [Row(**json.loads(file.read_text())) for file in sorted(folder.glob("*.json"))]


def table(rows: Sequence[Row]) -> str:
    """Markdown. Numbers of families are sums, or the range where they differ."""
    lines = [_HEAD]
    for agent in dict.fromkeys(row.agent for row in rows):
        own = [row for row in rows if row.agent == agent]
        families = [name for name in FAMILIES if any(row.family == name for row in own)]
        other = sum((Counter(row.designed) for row in own), Counter[str]())
        cells = (
            agent,
            own[0].version,
            ", ".join(families),
            _range([len(row.offered) for row in own]),
            _range([len(row.driven) for row in own]),
            _range([row.turns for row in own]),
            _range([row.paths for row in own]),
            str(sum(len(row.needless) for row in own)),
            str(sum(len(row.refused) for row in own)),
            str(sum(len(row.changed) for row in own)),
            str(sum(len(row.failed) for row in own)),
            ", ".join(f"{reason} {number}" for reason, number in sorted(other.items())),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def designs(known: Iterable[Agent]) -> str:
    """Markdown: the forks that are an agent's own design."""
    lines = [
        f"| {agent.name} | {design.name} | {design.proof} |"
        for agent in known
        for design in agent.designs
    ]
    return "\n".join(["| agent | fork | what shows it |\n|---|---|---|", *lines])


def write_page(rows: Sequence[Row], known: Iterable[Agent], page: Path) -> None:
    """Replaces the tables between the page's marks. Lines of agents without a result stay."""
    text = page.read_text()
    lines = table(rows).splitlines()[2:]
    measured = {row.agent for row in rows}
    lines += [line for line in _between(text, "census") if _agent(line) not in measured]
    whole = "\n".join([_HEAD, *sorted(lines, key=_agent)])
    for mark, content in (("census", whole), ("designs", designs(known))):
        begin, end = f"<!-- {mark}: begin -->", f"<!-- {mark}: end -->"
        before, _, rest = text.partition(begin)
        text = f"{before}{begin}\n{content}\n{end}{rest.partition(end)[2]}"
    page.write_text(text)


def _between(text: str, mark: str) -> list[str]:
    """The lines of the table between the marks, without its head."""
    inner = text.partition(f"<!-- {mark}: begin -->")[2].partition(f"<!-- {mark}: end -->")[0]
    return inner.strip().splitlines()[2:]


def _agent(line: str) -> str:
    return line.split("|")[1].strip()


def _range(numbers: Sequence[int]) -> str:
    low, high = min(numbers), max(numbers)
    return str(low) if low == high else f"{low} to {high}"
