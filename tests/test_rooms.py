"""The structure of the packages, read from the source: which room imports which.

A room is a top-level folder of a package (`proxy/store`) or a module next to those folders
(`proxy/routing`). Imports inside functions and under `TYPE_CHECKING` count, too.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from itertools import chain
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("proxy", "agent_loop", "trainer", "harbor_sdk")
# What each package may import of the others.
LAYERS: dict[str, set[str]] = {
    "proxy": set(),
    "harbor_sdk": set(),
    "agent_loop": {"proxy", "harbor_sdk"},
    "trainer": {"proxy", "agent_loop"},
}
HEAVY = {"torch", "vllm"}


@cache
def modules() -> dict[str, Path]:
    """Every module of the packages by its dotted name."""
    paths = chain.from_iterable((ROOT / package).rglob("*.py") for package in PACKAGES)
    names = {path: path.relative_to(ROOT).with_suffix("").as_posix() for path in paths}
    return {name.removesuffix("/__init__").replace("/", "."): path for path, name in names.items()}


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def room(module: str) -> str:
    """`proxy.store.sqlite` and `proxy.store` are in the room `proxy/store`."""
    return "/".join(module.split(".")[:2])


def imported(module: str) -> Iterator[str]:
    """Dotted names that a module imports, as far as they are modules."""
    for node in ast.walk(tree(modules()[module])):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} imports relatively; imports are absolute"
            source = node.module or ""
            for alias in node.names:
                full = f"{source}.{alias.name}"
                yield full if full in modules() else source


@cache
def room_imports() -> dict[str, set[str]]:
    """The rooms that each room imports; a package's `__init__` is its own room."""
    graph: dict[str, set[str]] = {room(module): set() for module in modules()}
    for module in modules():
        targets = {room(name) for name in imported(module) if name in modules()}
        graph[room(module)] |= targets - {room(module)}
    return graph


def reachable(start: str) -> set[str]:
    seen: set[str] = set()
    waiting = [start]
    while waiting:
        new = room_imports()[waiting.pop()] - seen
        seen |= new
        waiting += new
    return seen


def definitions() -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]]:
    for name, path in modules().items():
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                yield name, node


def test_no_two_rooms_import_each_other_directly_or_around_a_circle() -> None:
    circles = {name: reachable(name) for name in room_imports() if name in reachable(name)}
    inside = {name: sorted(targets & circles.keys()) for name, targets in circles.items()}
    assert not inside


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_between_packages_go_one_way(package: str) -> None:
    others = set(PACKAGES) - LAYERS[package] - {package}
    wrong = [
        f"{module} imports {name}"
        for module in modules()
        if module.split(".")[0] == package
        for name in imported(module)
        if name.split(".")[0] in others
    ]
    assert not wrong


def test_proxy_agent_loop_and_harbor_sdk_import_neither_torch_nor_vllm() -> None:
    wrong = [
        f"{module} imports {name}"
        for module in modules()
        if not module.startswith("trainer")
        for name in imported(module)
        if name.split(".")[0] in HEAVY
    ]
    assert not wrong


def test_every_public_class_has_a_docstring() -> None:
    bare = [
        f"{module}.{node.name}"
        for module, node in definitions()
        if isinstance(node, ast.ClassDef)
        and not node.name.startswith("_")
        and not ast.get_docstring(node)
    ]
    assert not bare
