"""What our code uses of other packages, collected from its source.

Names (`from vllm.x import y`, `torch.distributed.barrier`), attributes of arguments whose type is
annotated and of results of constructors, calls with their arguments, base classes and the methods
that override theirs, classes that say in `CONFORMS_TO` what they stand for, modules that are
imported by a name in a string, and the flags, routes and environment variables of vLLM.
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
_OF_FILES = re.compile(r"open|Path|(os|pathlib|shutil)\..+")
"""What Python opens, names or copies files by: a string given to it is no route."""


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
    load_flags: dict[str, str] = field(default_factory=dict)
    """Those in files that use vLLM's own load (`vllm bench serve`), which has further ones."""
    routes: dict[str, str] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)
    """Flag, route or variable → where it is used first."""


def collect(roots: Iterable[str]) -> Uses:
    uses = Uses()
    files = [file for folder in FOLDERS for file in sorted((ROOT / folder).rglob("*.py"))]
    trees = {str(file.relative_to(ROOT)): ast.parse(file.read_text("utf-8")) for file in files}
    declared = frozenset(flag for tree in trees.values() for flag in declared_flags(tree))
    for where, tree in trees.items():
        read(tree, where, frozenset(roots), uses, declared)
    for name in MANIFESTS:
        path = ROOT / name
        for file in [path] if path.is_file() else sorted(path.rglob("*.yaml")):
            where = str(file.relative_to(ROOT))
            for variable in _VARIABLE.findall(file.read_text("utf-8")):
                uses.variables.setdefault(variable, where)
    return uses


def read(
    tree: ast.Module,
    where: str,
    roots: frozenset[str],
    uses: Uses,
    declared: frozenset[str] = frozenset(),
) -> None:
    """Adds what one file uses. declared: the flags of all our own command lines."""
    _Reader(where, roots, uses, _Imports(tree)).body(tree.body, {})
    _strings(tree, where, uses, declared)


def declared_flags(tree: ast.Module) -> set[str]:
    """The flags of the parsers that a file makes."""
    return {
        str(getattr(each, "value", ""))
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument"
        for each in node.args
    }


class _Imports:
    """The modules that a file imports by strings: `import_module("a.b")`, `import_module(NAME)`,
    and `mine("b")` where `def mine(module): return import_module(f"a.{module}")`."""

    def __init__(self, tree: ast.Module) -> None:
        self._constants: dict[str, str] = {}
        self._helpers: dict[str, str] = {}
        for statement in tree.body:
            match statement:
                case (
                    ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant(value=str(text)))
                    | ast.AnnAssign(target=ast.Name(id=name), value=ast.Constant(value=str(text)))
                ):
                    self._constants[name] = text
                case ast.FunctionDef(name=name, args=ast.arguments(args=[ast.arg(arg=given)])):
                    for node in ast.walk(statement):
                        match node:
                            case ast.Call(
                                args=[
                                    ast.JoinedStr(
                                        values=[
                                            ast.Constant(value=str(start)),
                                            ast.FormattedValue(value=ast.Name(id=part)),
                                        ]
                                    )
                                ]
                            ) if part == given and _is_import(node):
                                self._helpers[name] = start

    def module(self, call: ast.Call) -> str | None:
        match call:
            case ast.Call(args=[ast.Constant(value=str(text)), *_]) if _is_import(call):
                return text
            case ast.Call(args=[ast.Name(id=name), *_]) if _is_import(call):
                return self._constants.get(name)
            case ast.Call(func=ast.Name(id=helper), args=[ast.Constant(value=str(text))]):
                return f"{self._helpers[helper]}{text}" if helper in self._helpers else None
        return None


def _is_import(call: ast.Call) -> bool:
    name = ast.unparse(call.func).rpartition(".")[2]
    return name in ("import_module", "run_module", "__import__")


class _Reader:
    """Walks scopes. A binding maps a local name to what it stands for: `vllm.x.Y`, or `Y()` for an
    instance of it."""

    def __init__(self, where: str, roots: frozenset[str], uses: Uses, imports: _Imports) -> None:
        self._where = where
        self._roots = roots
        self._uses = uses
        self._imports = imports

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
        self.body([ast.Expr(node.body)] if isinstance(node, ast.Lambda) else node.body, inner)

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
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=ast.Call() | ast.Attribute() as value)
                | ast.AnnAssign(
                    target=ast.Name(id=name), value=ast.Call() | ast.Attribute() as value
                )
            ) if self._is_of_import(value):
                known[name] = self._dotted(value, known) or ""
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Call() as call):
                made = self._dotted(call.func, known)
                if made is not None and "()" not in made and made.rpartition(".")[2][:1].isupper():
                    known[name] = f"{made}()"

    def _use(self, node: ast.AST, known: dict[str, str]) -> None:
        match node:
            case ast.Call():
                if module := self._imported(node):
                    self._add(node, module)
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
            case ast.Call():
                return self._imported(node)
        return None

    def _imported(self, call: ast.Call) -> str | None:
        module = self._imports.module(call) or ""
        return module if module.partition(".")[0] in self._roots else None

    def _is_of_import(self, node: ast.expr) -> bool:
        """`import_module("a")` or a name below it."""
        while isinstance(node, ast.Attribute):
            node = node.value
        return isinstance(node, ast.Call) and self._imported(node) is not None

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


def _strings(tree: ast.Module, where: str, uses: Uses, declared: frozenset[str]) -> None:
    file = Path(where)
    starts_vllm = file.match("proxy/engines/vllm*.py")
    of_vllm = starts_vllm or any(
        isinstance(node, ast.ImportFrom)
        and node.module == "proxy.engines.vllm_server"
        and any(alias.name == "VllmConfig" for alias in node.names)
        for node in ast.walk(tree)
    )
    loads = any(
        isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm.benchmarks")
        for node in ast.walk(tree)
    )
    flags = uses.load_flags if loads else uses.flags
    speaks_to_vllm = (
        (file.match("proxy/engines/*.py") and file.name not in SERVERS_OF_OTHERS)
        or file.match("proxy/extras/relay/engine_weights.py")
        or file.match("trainer/weight_sync/control.py")
    )
    # What starts vLLM gives it flags that our command lines have as well, like --port.
    own_flags = declared_flags(tree) | (set() if starts_vllm else declared)
    paths = _file_names(tree) if speaks_to_vllm else set()
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):  # a part of another text, like /proc/{pid}/task
            paths |= {id(each) for each in node.values[1:] if _begins_with_path(node)}
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            for variable in _VARIABLE.findall(node.value):
                uses.variables.setdefault(variable, where)
            flag, route = node.value.partition("=")[0], node.value.partition("?")[0]
            if of_vllm and _FLAG.fullmatch(flag) and flag not in own_flags:
                flags.setdefault(flag, where)
            if speaks_to_vllm and _ROUTE.fullmatch(route) and id(node) not in paths:
                uses.routes.setdefault(route, where)


def _file_names(tree: ast.Module) -> set[int]:
    """The strings by which files are opened, and those of the names that stand for them."""
    given = [
        argument
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and _OF_FILES.fullmatch(ast.unparse(node.func))
        for argument in (*node.args, *(each.value for each in node.keywords))
    ]
    names = {each.id for each in given if isinstance(each, ast.Name)}
    for node in ast.walk(tree):
        match node:
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant() as value)
                | ast.AnnAssign(target=ast.Name(id=name), value=ast.Constant() as value)
            ):
                given += [value] if name in names else []
    return {id(each) for each in given}


def _begins_with_path(text: ast.JoinedStr) -> bool:
    first = text.values[0]
    return isinstance(first, ast.Constant) and str(first.value).startswith("/")
