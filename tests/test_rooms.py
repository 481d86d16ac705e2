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
# What is not yet reached through a registry; this becomes empty.
STILL_IMPORTED: set[tuple[str, str]] = {
    ("proxy.cli", "proxy/extras/engines"),
    ("proxy.testing.scripted_engine", "proxy/extras/binary_route"),
    ("proxy.testing.scripted_engine", "proxy/extras/engines"),
    ("proxy.testing.scripted_frames", "proxy/extras/binary_route"),
    ("proxy.testing.scripted_wires", "proxy/extras/engines"),
    ("trainer.cluster", "trainer/extras/ray"),
    ("trainer.cluster.cluster", "proxy/extras/telemetry"),
    ("trainer.cluster.cluster", "trainer/extras/relay"),
    ("trainer.cluster.engines", "trainer/extras/relay"),
    ("trainer.cluster.local", "trainer/extras/relay"),
    ("trainer.cluster.proxy_server", "proxy/extras/rules"),
    ("trainer.cluster.rank_zero", "trainer/extras/relay"),
    ("trainer.cluster.services", "proxy/extras/view"),
    ("trainer.cluster.services", "trainer/extras/relay"),
    ("trainer.commands.sample_trials", "trainer/extras/relay"),
    ("trainer.learning.learner", "trainer/extras/relay"),
    ("trainer.learning.policies", "trainer/extras/relay"),
    ("trainer.run.log", "proxy/extras/telemetry"),
    ("trainer.weight_sync.adapters", "proxy/extras/relay"),
    ("trainer.weight_sync.segment", "proxy/extras/relay"),
}
# Extras that are of use only together, or for each other.
TOGETHER: set[tuple[str, str]] = {
    ("agent_loop.extras.verl.agent_loop", "proxy/extras/rules"),
    ("proxy.extras.relay.published_weights", "proxy/extras/several_processes"),
    ("proxy.extras.view.answers", "proxy/extras/rules"),
    ("proxy.extras.view.api", "proxy/extras/rules"),
    ("trainer.extras.gloo.group", "proxy/extras/relay"),
    ("trainer.extras.mirror", "proxy/extras/relay"),
    ("trainer.extras.ray.actors", "trainer/extras/relay"),
    ("trainer.extras.ray.cluster", "trainer/extras/relay"),
    ("trainer.extras.ray.worker", "trainer/extras/relay"),
    ("trainer.extras.relay.learner_weights", "proxy/extras/relay"),
    ("trainer.extras.relay.node", "proxy/extras/relay"),
    ("trainer.extras.relay.published_adapters", "proxy/extras/relay"),
    ("trainer.extras.relay.published_weights", "proxy/extras/relay"),
    ("trainer.extras.relay.run_publications", "proxy/extras/relay"),
    ("trainer.extras.report.page", "proxy/extras/view"),
    ("trainer.extras.report.pairs", "proxy/extras/view"),
    ("trainer.extras.report.series", "proxy/extras/view"),
    ("trainer.extras.report.transcripts", "proxy/extras/view"),
    ("trainer.extras.report.trials", "proxy/extras/view"),
    ("trainer.extras.report.troubles", "proxy/extras/view"),
    ("trainer.extras.sft.config", "proxy/extras/export"),
    ("trainer.extras.sft.demonstrations", "proxy/extras/export"),
    ("trainer.extras.sft.sources", "proxy/extras/export"),
    ("trainer.extras.swarm", "agent_loop/extras/swarm"),
    ("trainer.extras.telemetry", "proxy/extras/telemetry"),
    ("trainer.extras.trace", "proxy/extras/view"),
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
    assert extras_imported(by_extras=False) == STILL_IMPORTED


def test_extras_do_not_import_each_other() -> None:
    assert extras_imported(by_extras=True) == TOGETHER


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
