"""The structure of the packages, read from the source: which room imports which.

A room is a top-level folder of a package (`proxy/store`), a module next to those folders
(`proxy/config`), or an extra (`proxy/extras/relay`). The core is every room but the extras. Imports
inside functions and under `TYPE_CHECKING` count, too.
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
# Extra → the extras that it imports, each with the reason.
TOGETHER: dict[str, dict[str, str]] = {
    "agent_loop/extras/verl": {
        "agent_loop/extras/ray": "what agents must not reach of Ray",
        "proxy/extras/rules": "verl's workers run a proxy with rules",
    },
    "proxy/extras/relay": {
        "proxy/extras/several_processes": "weights are published once for all proxies on a store"
    },
    "proxy/extras/export": {"proxy/extras/secrets": "an export is without secrets"},
    "proxy/extras/view": {
        "proxy/extras/export": "the page downloads a session as `export` writes it",
        "proxy/extras/rules": "the page saves and removes rules",
        "proxy/extras/secrets": "the page shows no secrets",
    },
    "trainer/extras/learn": {
        "proxy/extras/learn": "the learner's side of it",
        "proxy/extras/secrets": "no token of a secret is trained, and no decision quotes one",
        "trainer/extras/ledger": "adapters are computed again from their record",
    },
    "trainer/extras/mirror": {"proxy/extras/relay": "one client of file systems at URLs"},
    "trainer/extras/ray": {
        "agent_loop/extras/ray": "what agents must not reach of Ray",
        "trainer/extras/relay": "relay workers as actors",
    },
    "trainer/extras/relay": {"proxy/extras/relay": "the trainer's side of it"},
    "trainer/extras/report": {"proxy/extras/view": "the report shows what the page shows"},
    "trainer/extras/sft": {
        "proxy/extras/export": "sessions are read as `export` reads them",
        "proxy/extras/secrets": "no token of a secret is trained",
    },
    "trainer/extras/swarm": {"agent_loop/extras/swarm": "the trainer's side of it"},
    "trainer/extras/telemetry": {"proxy/extras/telemetry": "one sender of OpenTelemetry"},
    "trainer/extras/trace": {"proxy/extras/view": "the page's trace as a file"},
}


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
    parts = module.split(".")
    return "/".join(parts[: 3 if is_extra(module) else 2])


def is_extra(module: str) -> bool:
    return module.split(".")[1:2] == ["extras"]


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
    """The rooms of the core that each of them imports; a package's `__init__` is its own room."""
    core = [module for module in modules() if not is_extra(module)]
    graph: dict[str, set[str]] = {room(module): set() for module in core}
    for module in core:
        targets = {room(name) for name in imported(module) if name in core}
        graph[room(module)] |= targets - {room(module)}
    return graph


def reachable(start: str, graph: dict[str, set[str]]) -> set[str]:
    """Everything that `start` imports, directly or not."""
    seen: set[str] = set()
    waiting = [start]
    while waiting:
        new = graph[waiting.pop()] - seen
        seen |= new
        waiting += new
    return seen


def extras_imported(by_extras: bool) -> set[tuple[str, str]]:
    """Which module imports which extra of another room."""
    return {
        (module, room(name))
        for module in modules()
        if is_extra(module) == by_extras
        for name in imported(module)
        if name in modules() and is_extra(name) and room(name) != room(module)
    }


def circles(graph: dict[str, set[str]]) -> dict[str, list[str]]:
    """Every name that is on a circle of imports, and what it imports of its circle."""
    targets = {name: reachable(name, graph) for name in graph}
    return {
        name: sorted(other for other in graph[name] if name in targets[other])
        for name in graph
        if name in targets[name]
    }


@cache
def file_imports() -> dict[str, set[str]]:
    """The modules that each module imports, also under `TYPE_CHECKING` and inside functions."""
    return {name: {*imported(name)} & modules().keys() for name in modules()}


def definitions() -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]]:
    for name, path in modules().items():
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                yield name, node


def test_no_two_rooms_import_each_other_directly_or_around_a_circle() -> None:
    assert not circles(room_imports())


def test_no_two_files_import_each_other_directly_or_around_a_circle() -> None:
    assert not circles(file_imports())


def test_circle_of_three_is_found_and_what_leads_into_it_is_not() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set(), "e": {"a"}}
    assert circles(graph) == {"a": ["b"], "b": ["c"], "c": ["a"]}


def test_the_core_imports_no_extra() -> None:
    """The scripted engine of `proxy.testing`, a tool for tests, speaks the wires of all engines."""
    found = extras_imported(by_extras=False)
    assert not {(name, each) for name, each in found if not name.startswith("proxy.testing")}


def test_extras_import_each_other_only_for_a_reason() -> None:
    found = {(room(module), imported) for module, imported in extras_imported(by_extras=True)}
    assert found == {(extra, each) for extra, others in TOGETHER.items() for each in others}


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
