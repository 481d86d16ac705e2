"""Writes the versions of the environments that are installed here beside `.venv`.

    make agents harbor PINS=           # the newest of what their requirements allow
    python -m tests.pins [NAME ...]

A NAME is that of a file in this folder without `.txt`; without one, all that are installed. CI
installs exactly these versions. If each machine chose the newest ones, the release of any package
could fail a commit that had passed.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
PINS = Path(__file__).parent
AGENTS = ("aider", "crewai", "frameworks", "gptme", "openhands", "python", "vibe")
CACHED = ("export-packages", "helm", "openenv", "phoenix", "verifiers")
CONSTRAINTS = tuple(ROOT / f"docker/{each}_constraints.txt" for each in ("cpu", "gpu"))


def environments() -> Mapping[str, Path]:
    """Name of a file of pins → the environment that it is of."""
    return {
        **{f"agents-{name}": ROOT / ".agents" / name for name in AGENTS},
        **{name: ROOT / ".cache" / name for name in CACHED},
        "harbor": ROOT / ".harbor",
        "reference": ROOT / ".venv",
    }


def pinned(file: Path) -> dict[str, str]:
    """Package → version."""
    lines = file.read_text("utf-8").splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def installed(environment: Path) -> dict[str, str]:
    """Package → version, without what is installed from a folder.

    Raises: subprocess.CalledProcessError
    """
    listed = subprocess.run(
        [sys.executable, "-m", "uv", "pip", "freeze", "-q", "--python", environment / "bin/python"],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout
    lines = [line for line in listed.splitlines() if "==" in line]
    pairs = (line.partition("+")[0].split("==") for line in lines)  # without +cpu
    return {name: version for name, version in pairs if name != "pip"}


def write(name: str, environment: Path) -> None:
    found = installed(environment)
    if name == "reference":  # the others of .venv are in its constraints
        for file in CONSTRAINTS:
            found = {each: found[each] for each in found if each not in pinned(file)}
    text = "".join(f"{package}=={version}\n" for package, version in sorted(found.items()))
    (PINS / f"{name}.txt").write_text(f"# Written by python -m tests.pins.\n{text}", "utf-8")
    print(f"{name}: {len(found)} packages")


def main() -> None:
    there = {name: path for name, path in environments().items() if (path / "bin/python").exists()}
    parser = argparse.ArgumentParser(prog="python -m tests.pins", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(environments()))
    names = parser.parse_args().names
    for name in names or there:
        if name not in there:
            parser.error(f"{name}: not installed; there are {', '.join(there)}")
        write(name, there[name])


if __name__ == "__main__":
    main()
