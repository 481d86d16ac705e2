"""What our code uses of other packages, collected from its source.

Names (`from vllm.x import y`, `torch.distributed.barrier`), attributes of arguments whose type is
annotated and of results of constructors, calls with their arguments, base classes and the methods
that override theirs, classes that say in `CONFORMS_TO` what they stand for, and the flags, routes
and environment variables of vLLM.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("proxy", "agent_loop", "trainer", "harbor_sdk", "benchmarks", "examples")
MANIFESTS = ("docker/compose.yaml", "k8s")
SERVERS_OF_OTHERS = {"sglang.py", "scripted.py", "frames.py"}
"""Modules of `proxy/engines` whose routes are not vLLM's: other engines, and our own middleware."""
_VARIABLE = re.compile(r"\bVLLM_[A-Z][A-Z0-9_]*[A-Z0-9]\b")
_FLAG = re.compile(r"--[a-z][a-z0-9-]*")
_ROUTE = re.compile(r"/[a-z][a-z0-9_/]*[a-z0-9]")


@dataclass(frozen=True)
class Use:
    where: str
    name: str
    """Dotted, from the package's root."""
    call: ast.Call | None = None
    is_bound: bool = False
    """A method of an instance: `self` is not among the arguments."""


@dataclass(frozen=True)
class Stand:
    """A class of ours that takes the place of one of theirs."""

    where: str
    node: ast.ClassDef
    base: str
    is_subclass: bool


@dataclass
class Uses:
    names: list[Use] = field(default_factory=list)
    stands: list[Stand] = field(default_factory=list)
    flags: dict[str, str] = field(default_factory=dict)
    routes: dict[str, str] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)
    """Flag, route or variable → where it is used first."""


def collect(roots: Iterable[str]) -> Uses:
    uses = Uses()
    for folder in FOLDERS:
        for file in sorted((ROOT / folder).rglob("*.py")):
            read(file.read_text("utf-8"), str(file.relative_to(ROOT)), frozenset(roots), uses)
    for name in MANIFESTS:
        path = ROOT / name
        for file in [path] if path.is_file() else sorted(path.rglob("*.yaml")):
            where = str(file.relative_to(ROOT))
            for variable in _VARIABLE.findall(file.read_text("utf-8")):
                uses.variables.setdefault(variable, where)
    return uses


def read(source: str, where: str, roots: frozenset[str], uses: Uses) -> None:
    tree = ast.parse(source)
    _Reader(where, roots, uses).body(tree.body, {})
    _strings(tree, where, uses)


class _Reader:
    """Walks scopes. A binding maps a local name to what it stands for: `vllm.x.Y`, or `Y()` for an
    instance of it."""

    def __init__(self, where: str, roots: frozenset[str], uses: Uses) -> None:
        self._where = where
        self._roots = roots
        self._uses = uses

    def body(self, statements: list[ast.stmt], outer: dict[str, str]) -> None:
        known = dict(outer)
        inner = list(_this_scope(statements))
        for node in inner:
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                known.pop(node.id, None)
        for node in inner:
            self._bind(node, known)
        for node in inner:
            self._use(node, known)
            match node:
                case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda():
                    self._function(node, known)
                case ast.ClassDef():
                    self._class(node, known)

    def _function(
        self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda, known: dict[str, str]
    ) -> None:
        inner = dict(known)
        given = node.args
        narrowed = {
            ast.unparse(call.args[0])
            for call in ast.walk(node)
            if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "isinstance"
        }
        for argument in (*given.posonlyargs, *given.args, *given.kwonlyargs):
            inner.pop(argument.arg, None)
            typed = self._dotted(argument.annotation, known) if argument.annotation else None
            if typed is not None and argument.arg not in narrowed:
                inner[argument.arg] = f"{typed}()"
        statements = [ast.Expr(node.body)] if isinstance(node, ast.Lambda) else node.body
        self.body(statements, inner)

    def _class(self, node: ast.ClassDef, known: dict[str, str]) -> None:
        bases = [base for each in node.bases if (base := self._dotted(each, known))]
        for base in bases:
            self._uses.stands.append(Stand(self._at(node), node, base, is_subclass=True))
        for statement in node.body:
            match statement:
                case ast.AnnAssign(
                    target=ast.Name(id="CONFORMS_TO"), value=ast.Constant(value=str(name))
                ):
                    self._uses.stands.append(Stand(self._at(node), node, name, is_subclass=False))
        self.body(node.body, known)

    def _bind(self, node: ast.AST, known: dict[str, str]) -> None:
        match node:
            case ast.Import():
                for alias in node.names:
                    first = alias.name.partition(".")[0]
                    if first in self._roots:
                        known[alias.asname or first] = alias.name if alias.asname else first
                        self._add(node, alias.name)
            case ast.ImportFrom(module=str(module), level=0):
                if module.partition(".")[0] in self._roots:
                    for alias in node.names:
                        known[alias.asname or alias.name] = f"{module}.{alias.name}"
                        self._add(node, f"{module}.{alias.name}")
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Call() as call):
                made = self._dotted(call.func, known)
                if made is not None and "()" not in made and made.rpartition(".")[2][:1].isupper():
                    known[name] = f"{made}()"

    def _use(self, node: ast.AST, known: dict[str, str]) -> None:
        match node:
            case ast.Call():
                name = self._dotted(node.func, known)
                if name is not None and not name.endswith("()"):
                    self._add(node, name, node)
            case ast.Attribute():
                name = self._dotted(node, known)
                if name is not None:
                    self._add(node, name)

    def _dotted(self, node: ast.expr | None, known: dict[str, str]) -> str | None:
        match node:
            case ast.Name(id=name):
                return known.get(name)
            case ast.Attribute(value=value, attr=attribute):
                owner = self._dotted(value, known)
                return None if owner is None else f"{owner}.{attribute}"
        return None

    def _add(self, node: ast.stmt | ast.expr, name: str, call: ast.Call | None = None) -> None:
        self._uses.names.append(Use(self._at(node), name.replace("()", ""), call, "()" in name))

    def _at(self, node: ast.stmt | ast.expr) -> str:
        return f"{self._where}:{node.lineno}"


def _this_scope(statements: list[ast.stmt]) -> Iterator[ast.AST]:
    """All nodes but the bodies of functions and classes."""
    waiting: list[ast.AST] = list(reversed(statements))
    while waiting:
        node = waiting.pop()
        yield node
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                outside: list[ast.AST | None] = [*node.decorator_list, node.returns]
                outside += [*node.args.defaults, *node.args.kw_defaults]
                waiting += [each for each in outside if each is not None]
            case ast.ClassDef():
                waiting += [*node.decorator_list, *node.bases]
            case ast.Lambda():
                pass
            case _:
                waiting += reversed(list(ast.iter_child_nodes(node)))


def _strings(tree: ast.Module, where: str, uses: Uses) -> None:
    file = Path(where)
    of_vllm = file.match("proxy/engines/vllm*.py") or any(
        isinstance(node, ast.ImportFrom)
        and node.module == "proxy.engines.vllm_server"
        and any(alias.name == "VllmConfig" for alias in node.names)
        for node in ast.walk(tree)
    )
    speaks_to_vllm = (
        (file.match("proxy/engines/*.py") and file.name not in SERVERS_OF_OTHERS)
        or file.match("proxy/relay/engine_weights.py")
        or file.match("trainer/weight_sync/control.py")
    )
    own_flags: set[str] = set()
    paths: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
            own_flags |= {str(getattr(each, "value", "")) for each in node.args}
        if isinstance(node, ast.JoinedStr):  # a part of another text, like /proc/{pid}/task
            paths |= {id(each) for each in node.values[1:] if _begins_with_path(node)}
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            for variable in _VARIABLE.findall(node.value):
                uses.variables.setdefault(variable, where)
            flag, route = node.value.partition("=")[0], node.value.partition("?")[0]
            if of_vllm and _FLAG.fullmatch(flag) and flag not in own_flags:
                uses.flags.setdefault(flag, where)
            if speaks_to_vllm and _ROUTE.fullmatch(route) and id(node) not in paths:
                uses.routes.setdefault(route, where)


def _begins_with_path(text: ast.JoinedStr) -> bool:
    first = text.values[0]
    return isinstance(first, ast.Constant) and str(first.value).startswith("/")
