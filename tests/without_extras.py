"""Whether the core stands without each extra: `python -m tests.without_extras [NAME …] [--run]`.

For each extra, one after the other, in a copy of the packages: its folder and its line in the
proxy's registry are deleted, every module of the core is imported, and the quickstart's
configuration is checked.

With `--run`, also the fast tests of the core's rooms are run, each file once, where all extras are
deleted but those that the file names (`proxy.extras.rules`) or reaches by imports: what passes
there passes where any one of them is deleted. As many tests are collected as in the whole
repository, and no other ones are skipped. Exits with 1 if something fails.
"""

from __future__ import annotations

import argparse
import ast
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from xml.etree import ElementTree

from tests.test_rooms import PACKAGES, ROOT, imported, is_extra, modules, room

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
OWN = Path(__file__)
REGISTRY = "proxy/extra_registry.py"
FAILURES, NO_TESTS = 1, 5
"""Pytest's exit codes where tests fail, and where no test is fast."""
TAIL_CHARS = 2000
EVERY = "every extra"
"""In a test's file: it is about what all of them have, such as the page of all keys."""
FAST = "not programs and not slow and not long"


def extras() -> list[str]:
    """The folders and modules of extras. Example: "proxy/extras/relay" """
    return sorted({room(name) for name in modules() if is_extra(name) and name.count(".") > 1})


def core() -> list[str]:
    return sorted(
        name for name in modules() if not is_extra(name) and not name.startswith(NOT_IMPORTED)
    )


def reaching(extra: str) -> set[str]:
    """The files of tests that name the extra's modules, or import a file that does."""
    files = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): path
        for path in (ROOT / "tests").rglob("*.py")
    }
    dotted = extra.replace("/", ".")
    text = {name: path.read_text("utf-8") for name, path in files.items() if path != OWN}
    touched = {name for name in text if dotted in text[name] or EVERY in text[name]}
    while more := {
        name for name in text.keys() - touched if any(each in text[name] for each in touched)
    }:
        touched |= more
    return {str(files[name].relative_to(ROOT)) for name in touched}


def tests_of_the_core() -> list[str]:
    return sorted(
        str(path.relative_to(ROOT))
        for room in ("proxy", "agent_loop", "trainer")
        for path in (ROOT / "tests" / room).rglob("test_*.py")
        if "extras" not in path.parts
    )


def groups() -> dict[frozenset[str], list[str]]:
    """The tests of the core's rooms, by the extras that they reach."""
    reached = {extra: reaching(extra) for extra in extras()}
    imports = {extra: _imports(extra) for extra in reached}
    found: dict[frozenset[str], list[str]] = {}
    for test in tests_of_the_core():
        own = {extra for extra, tests in reached.items() if test in tests}
        while more := {each for extra in own for each in imports[extra]} - own:
            own |= more
        found.setdefault(frozenset(own), []).append(test)
    return found


def _imports(extra: str) -> set[str]:
    """The other extras that it imports: the few exceptions of tests/test_rooms.py."""
    own = [name for name in modules() if room(name) == extra]
    names = {each for name in own for each in imported(name)}
    return {room(name) for name in names if is_extra(name) and name.count(".") > 1} - {extra}


@contextmanager
def copy_without(gone: Iterable[str]) -> Iterator[Path]:
    """A folder like the repository's, without these extras."""
    with tempfile.TemporaryDirectory() as place:
        here = Path(place)
        for path in ROOT.iterdir():
            if path.name in (*PACKAGES, "tests"):
                shutil.copytree(
                    path, here / path.name, ignore=shutil.ignore_patterns("__pycache__")
                )
            elif path.name not in (".git", "runs"):
                (here / path.name).symlink_to(path)
        for extra in gone:
            if (here / extra).is_dir():
                shutil.rmtree(here / extra)
            else:
                (here / extra).with_suffix(".py").unlink()
        registry = here / REGISTRY
        lines = _Unregistered([extra.replace("/", ".") for extra in gone])
        registry.write_text(ast.unparse(lines.visit(ast.parse(registry.read_text("utf-8")))))
        yield here


class _Unregistered(ast.NodeTransformer):
    """Takes out the lines of extras: entries of tables, and optional paths, which become None."""

    def __init__(self, gone: Iterable[str]) -> None:
        self._gone = tuple(f"{extra}{end}" for extra in gone for end in ".:")

    def visit_Dict(self, node: ast.Dict) -> ast.Dict:
        kept = [each for each in zip(node.keys, node.values, strict=True) if self._stays(each[1])]
        node.keys, node.values = [key for key, _ in kept], [value for _, value in kept]
        return node

    def visit_Tuple(self, node: ast.Tuple) -> ast.Tuple:
        node.elts = [each for each in node.elts if self._stays(each)]
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AnnAssign:
        if isinstance(node.value, ast.Constant) and not self._stays(node.value):
            node.value = ast.Constant(None)
        self.generic_visit(node)
        return node

    def _stays(self, node: ast.expr) -> bool:
        return not any(
            isinstance(each, ast.Constant) and str(each.value).startswith(self._gone)
            for each in ast.walk(node)
        )


def stands(extra: str) -> str:
    """What fails without the extra; empty if nothing does."""
    with copy_without([extra]) as here:
        command = [sys.executable, "-c", _CORE.format(names=core())]
        environment = {**os.environ, "PYTHONPATH": str(here)}
        done = subprocess.run(command, cwd=here, env=environment, capture_output=True, text=True)
    return (done.stderr or done.stdout).strip().splitlines()[-1] if done.returncode else ""


def passes(reached: frozenset[str], tests: list[str]) -> str:
    """What fails where only these extras are left, as a line; beginning with `passed` if nothing
    does, nothing is missing, and nothing is skipped that is not skipped in the whole repository."""
    with copy_without(set(extras()) - reached) as here:
        made = _run(here, tests)
    if isinstance(made, str):
        return made
    if failed := sorted(case for case, what in made.items() if what == "failed"):
        return f"failed: {', '.join(failed)}"
    skipped = {case for case, what in made.items() if what == "skipped"}
    whole = _run(ROOT, tests, "--collect-only")
    if skipped:
        again = _run(ROOT, sorted({f"{case.partition('::')[0]}" for case in skipped}))
        assert not isinstance(again, str), again
        new = {case for case in skipped if again.get(case) != "skipped"}
        if new:
            return f"skipped only here: {', '.join(sorted(new))}"
    if isinstance(whole, str) or len(whole) != len(made):
        return f"{len(made)} tests here, in the whole repository {len(whole)}"
    return f"passed {len(made) - len(skipped)}, skipped {len(skipped)}"


def _run(place: Path, tests: list[str], *more: str) -> dict[str, str] | str:
    """Each test's name and what became of it; or the end of what pytest says if it breaks off."""
    with tempfile.NamedTemporaryFile(suffix=".xml") as report:
        command = [sys.executable, "-m", "pytest", "-m", FAST, f"--junitxml={report.name}"]
        environment = {**os.environ, "PYTHONPATH": str(place)}
        done = subprocess.run(
            [*command, *more, *tests], cwd=place, env=environment, capture_output=True, text=True
        )
        if done.returncode == NO_TESTS:
            return {}
        if done.returncode > FAILURES:
            return (done.stdout + done.stderr)[-TAIL_CHARS:]
        if more:  # only collected
            return {line: "" for line in done.stdout.splitlines() if "::" in line}
        cases = ElementTree.parse(report.name).iter("testcase")
        return {_name(case): _outcome(case) for case in cases}


def _name(case: ElementTree.Element) -> str:
    """Of the file, and of the test in it."""
    parts = case.attrib["classname"].split(".")
    file = next("/".join(parts[: n + 1]) for n in range(len(parts)) if parts[n].startswith("test_"))
    return f"{file}.py::{case.attrib['name']}"


def _outcome(case: ElementTree.Element) -> str:
    if case.find("failure") is not None or case.find("error") is not None:
        return "failed"
    return "skipped" if case.find("skipped") is not None else "passed"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", help="extras, as proxy/extras/relay; default: all")
    parser.add_argument("--run", action="store_true", help="also run the core's fast tests")
    arguments = parser.parse_args()
    failed = 0
    for extra in arguments.names or extras():
        reason = stands(extra)
        failed += bool(reason)
        print(f"{extra}: {reason or 'the core stands'}", flush=True)
    for reached, tests in groups().items() if arguments.run else ():
        said = passes(reached, tests)
        failed += not said.startswith("passed")
        kept = ", ".join(sorted(reached)) or "no extra"
        print(f"{len(tests)} files with {kept}: {said}", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
