"""Text is read and written as UTF-8, whatever the machine's locale: each place that opens a file or
a program's output as text names its encoding."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = ("proxy", "agent_loop", "trainer", "harbor_sdk", "examples", "benchmarks")
MODE_AT = {"open": 1, "fdopen": 1, "NamedTemporaryFile": 0, "TemporaryFile": 0}
"""Position of the mode in the call of a function, one less in that of a method."""
BINARY_BY_DEFAULT = {"NamedTemporaryFile", "TemporaryFile"}
PROGRAMS = {"run", "Popen", "check_output"}


def unnamed(source: str) -> Iterator[ast.Call]:
    """The calls that open text without naming its encoding."""
    tree = ast.parse(source)
    awaited = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Await)}
    for call in ast.walk(tree):
        if isinstance(call, ast.Call) and id(call) not in awaited and _opens_text(call):
            keywords = {keyword.arg for keyword in call.keywords}
            if not keywords & {"encoding", None}:
                yield call


def _opens_text(call: ast.Call) -> bool:
    """A method `open` counts if it takes nothing or a mode, as that of `pathlib.Path` does."""
    owner, _, name = ast.unparse(call.func).rpartition(".")
    given = {keyword.arg: keyword.value for keyword in call.keywords}
    if name == "read_text":
        return not call.args
    if name == "write_text":
        return len(call.args) < 2
    if name in PROGRAMS and owner in ("", "subprocess"):
        flags = (given.get("text"), given.get("universal_newlines"))
        return any(isinstance(flag, ast.Constant) and flag.value is True for flag in flags)
    if name not in MODE_AT or (owner == "os" and name == "open"):
        return False
    at = MODE_AT[name] - (name == "open" and owner not in ("", "io"))
    mode = given.get("mode") or (call.args[at] if len(call.args) > at else None)
    if mode is None:
        return name not in BINARY_BY_DEFAULT
    return isinstance(mode, ast.Constant) and not set(str(mode.value)) - set("rwaxt+")


@pytest.mark.parametrize("package", SOURCES)
def test_every_text_has_an_encoding(package: str) -> None:
    files = sorted((ROOT / package).rglob("*.py"))
    assert files
    found = [
        f"{file.relative_to(ROOT)}:{call.lineno}"
        for file in files
        for call in unnamed(file.read_text("utf-8"))
    ]
    assert not found, 'give encoding="utf-8"'


@pytest.mark.parametrize(
    "source",
    [
        "path.read_text()",
        "path.write_text(text)",
        "open(name)",
        "open(name, 'w')",
        "path.open()",
        "path.open('a')",
        "path.open(mode='a')",
        "os.fdopen(descriptor, 'w')",
        "io.open(name, 'r')",
        "NamedTemporaryFile('w')",
        "subprocess.run(argv, text=True)",
    ],
)
def test_call_without_an_encoding_is_found(source: str) -> None:
    assert len(list(unnamed(source))) == 1


@pytest.mark.parametrize(
    "source",
    [
        "path.read_text('utf-8')",
        "path.write_text(text, 'utf-8')",
        "open(name, 'rb')",
        "path.open('ab')",
        "path.open(encoding='utf-8')",
        "os.open(name, os.O_RDONLY)",
        "NamedTemporaryFile()",
        "await Store.open()",
        "Folder.open(path)",
        "os.fdopen(descriptor, 'wb')",
        "subprocess.run(argv)",
        "subprocess.run(argv, text=True, encoding='utf-8')",
    ],
)
def test_call_with_an_encoding_or_bytes_is_not_found(source: str) -> None:
    assert not list(unnamed(source))
