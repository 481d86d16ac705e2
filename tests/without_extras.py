"""Whether the core stands without each extra: `python -m tests.without_extras [NAME …] [--run]`.

For each extra, one after the other, in a copy of the packages: its folder is deleted, every module
of the core is imported, and the quickstart's configuration is checked. With `--run`, also the tests
of the core's rooms that reach the extra by no import are run there, as often and with as few skips
as in the whole repository. Exits with 1 if one of them fails.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.test_rooms import PACKAGES, ROOT, is_extra, modules, room

_CORE = """
import importlib, os, sys
import proxy
assert proxy.__file__.startswith(os.path.realpath(os.getcwd())), proxy.__file__
for name in {names!r}:
    importlib.import_module(name)
from trainer.cli import main
sys.exit(main(["--config", "agentic_trainer.yaml", "--check"]))
"""
NOT_IMPORTED = ("proxy.__main__", "proxy.testing", "proxy.engines.vllm_launch", "harbor_sdk")
"""Programs, test tools that speak every extra's wire, and what needs another environment."""
FAST = "not programs and not slow and not long"


def extras() -> list[str]:
    """The folders and modules of extras. Example: "proxy/extras/relay" """
    return sorted({room(name) for name in modules() if is_extra(name) and name.count(".") > 1})


def core() -> list[str]:
    return sorted(
        name for name in modules() if not is_extra(name) and not name.startswith(NOT_IMPORTED)
    )


def tests_without(extra: str) -> list[str]:
    """The files of tests of the core that reach the extra by no import, their helpers included."""
    files = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): path
        for path in (ROOT / "tests").rglob("*.py")
    }
    dotted = extra.replace("/", ".")
    text = {name: path.read_text("utf-8") for name, path in files.items()}
    touched = {name for name in files if dotted in text[name]}
    while more := {
        name for name in files.keys() - touched if any(each in text[name] for each in touched)
    }:
        touched |= more
    kept = files.keys() - touched
    return sorted(
        str(files[name].relative_to(ROOT))
        for name in kept
        if files[name].name.startswith("test_") and ".extras." not in name
        if name.split(".")[1] in ("proxy", "agent_loop", "trainer")
    )


def stands(extra: str, *, run: bool) -> str:
    """What fails without the extra; empty if nothing does."""
    with tempfile.TemporaryDirectory() as place:
        here = Path(place)
        for path in ROOT.iterdir():
            if path.name in (*PACKAGES, "tests"):
                shutil.copytree(
                    path, here / path.name, ignore=shutil.ignore_patterns("__pycache__")
                )
            elif path.name not in (".git", "runs"):
                (here / path.name).symlink_to(path)
        gone = here / extra
        if gone.is_dir():
            shutil.rmtree(gone)
        else:
            gone.with_suffix(".py").unlink()
        environment = {**os.environ, "PYTHONPATH": place}
        commands = [[sys.executable, "-c", _CORE.format(names=core())]]
        if run:
            files = tests_without(extra)
            commands.append([sys.executable, "-m", "pytest", "-x", "-m", FAST, *files])
        for command in commands:
            done = subprocess.run(
                command, cwd=here, env=environment, capture_output=True, text=True
            )
            if done.returncode:
                return (done.stderr or done.stdout).strip().splitlines()[-1]
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", help="extras, as proxy/extras/relay; default: all")
    parser.add_argument("--run", action="store_true", help="also run the core's fast tests")
    arguments = parser.parse_args()
    failed = 0
    for extra in arguments.names or extras():
        reason = stands(extra, run=arguments.run)
        failed += bool(reason)
        print(f"{extra}: {reason or 'the core stands'}", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
