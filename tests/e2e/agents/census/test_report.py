"""The table of docs/agents.md."""

from __future__ import annotations

from pathlib import Path

from tests.e2e.agents.census.report import write_page
from tests.e2e.agents.census.run import Row


def row(agent: str, family: str, turns: int, *failed: str) -> Row:
    return Row(agent, "1.0", family, "done", ["a", "b"], ["a"], turns, 1, failed=list(failed))


def test_page_gets_lines_of_results_and_keeps_those_of_other_agents(tmp_path: Path) -> None:
    page = tmp_path / "agents.md"
    page.write_text(
        "# Agents\n<!-- census: begin -->\n<!-- census: end -->\nEnd.\n"
        "<!-- designs: begin -->\n<!-- designs: end -->\n"
    )
    write_page([row("pi", "qwen3", 3), row("codex", "qwen3", 7)], [], page)
    write_page([row("codex", "glm", 5, "ended with 1"), row("codex", "qwen3", 7)], [], page)
    lines = page.read_text().splitlines()
    assert lines[4] == "| codex | 1.0 | qwen3, glm | 2 | 1 | 5 to 7 | 1 | 0 | 0 | 0 | 1 |  |"
    assert lines[5] == "| pi | 1.0 | qwen3 | 2 | 1 | 3 | 1 | 0 | 0 | 0 | 0 |  |"
    assert lines[6:8] == ["<!-- census: end -->", "End."]
