"""Every agent with every family, and the table of docs/agents.md.

    python -m tests.e2e.agents.census --agents codex pi --families qwen3.5

An agent that no package index holds (Crush) is run if its program is on PATH:

    PATH=$PATH:FOLDER python -m tests.e2e.agents.census --agents crush

Each result is a file of `.cache/census/results`, so that a census goes on with what it lacks (or,
with `--again`, measures again); the table is of all of them.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from proxy.testing.scripted_engine import ScriptedEngine
from tests.e2e.agents.census.agents import Agent, agents
from tests.e2e.agents.census.families import CONTEXT_TOKENS, FAMILIES, Writer, write_family
from tests.e2e.agents.census.report import load_rows, table, write_page
from tests.e2e.agents.census.run import Row, run_agent
from tests.e2e.agents.test_agents import AGENTS, ROOT
from tests.proxy.conftest import starting_proxies

CACHE = ROOT / ".cache/census"
PACKAGES = ROOT / ".cache/recipes/packages"
TIMEOUT_S = 900.0
"""Of a trial; a busy machine takes minutes for what takes seconds on an idle one."""


def checkpoint(family: str) -> Path:
    """The family's checkpoint in the cache."""
    folder = CACHE / "checkpoints" / family
    if not (folder / "chat_template.jinja").exists():
        write_family(FAMILIES[family], folder, PACKAGES)
    return folder


async def census_of(agent: Agent, writer: Writer, folder: Path, keep: Path) -> Row:
    """One agent with one family. What its trial left stays in `keep` if the row is not good."""
    token = writer.rendering.image_token
    async with (
        ScriptedEngine(lambda _: [], image_token=token) as engine,
        starting_proxies(folder, writer.rendering, keep) as start,
    ):
        proxy = await start(
            engine=engine,
            max_context_tokens=CONTEXT_TOKENS,
            rendering={"renderer": writer.renderer},
        )
        while token is not None and not (await proxy.control.engines())[0]["images"]:
            await engine.checked.wait()
        row, *_ = await run_agent(agent, proxy, writer, keep, timeout_s=TIMEOUT_S)
    if row.good:
        shutil.rmtree(keep, ignore_errors=True)
    return row


async def census(names: Sequence[str], families: Sequence[str], out: Path, again: bool) -> None:
    """Writes a row per agent and family into the folder `out`."""
    known = agents(AGENTS)
    out.mkdir(parents=True, exist_ok=True)
    for family in families:
        todo = [name for name in names if again or not (out / f"{name}-{family}.json").exists()]
        if not todo:
            continue
        folder = checkpoint(family)
        writer = Writer(FAMILIES[family], folder)
        for name in todo:
            keep = Path(tempfile.mkdtemp(prefix=f"census-{name}-{family}-"))
            row = await census_of(known[name], writer, folder, keep)
            (out / f"{name}-{family}.json").write_text(json.dumps(asdict(row), indent=1))
            sys.stderr.write(f"{row.summary()}\n" + ("" if row.good else f"  {keep}\n"))
            for fault in row.faults():
                sys.stderr.write(f"  {fault[:900]}\n")


def _check_installed(agents_given: Sequence[str], every: Mapping[str, Agent]) -> None:
    """Ends with what to install, all at once; says which agents are left out."""
    there = {
        "recipes": PACKAGES.exists(),
        "reference": importlib.util.find_spec("trl") is not None,
        "census": (AGENTS / "census").exists(),
    }
    if lacks := [name for name, is_there in there.items() if not is_there]:
        sys.exit(f"first run: python -m benchmarks.install {' '.join(lacks)}")
    if left := [
        n for n, each in every.items() if n not in agents_given and not each.is_installed()
    ]:
        sys.stderr.write(f"not installed, and left out: {', '.join(left)}\n")


def main() -> None:
    every = agents(AGENTS)
    known, there = list(every), [name for name, agent in every.items() if agent.is_installed()]
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.agents.census", description=__doc__)
    parser.add_argument("--agents", nargs="+", choices=known, default=there)
    parser.add_argument("--families", nargs="+", choices=list(FAMILIES), default=list(FAMILIES))
    parser.add_argument("--out", type=Path, default=CACHE / "results")
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--page", type=Path, help="write the table into this page")
    given = parser.parse_args()
    _check_installed(given.agents, every)
    asyncio.run(census(given.agents, given.families, given.out, given.again))
    rows = load_rows(given.out)
    print(table(rows))
    if given.page:
        write_page(rows, agents(AGENTS).values(), given.page)
    sys.exit(0 if all(row.good for row in rows) else 1)


if __name__ == "__main__":
    main()
