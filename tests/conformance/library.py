"""What packages define, read from their source without importing them.

`Library.find("vllm.config.VllmConfig.model_config")` follows imports from module to module, base
classes and names that are only assigned. What source code cannot tell (a compiled module, a module
that makes its names as it is imported) is `UNKNOWN`, never an error.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Literal

from tests.conformance.wheels import CONTENTS

UNKNOWN: Literal["unknown"] = "unknown"
Node = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.expr
_DYNAMIC = ("globals()[", "globals().update", "sys.modules[__name__]", "_LazyModule(")
_DEPTH = 40
"""More steps than this from name to name are a circle."""


@dataclass(frozen=True)
class Module:
    name: str


@dataclass(frozen=True)
class Definition:
    """A class, a function with its overloads, or a value (`nodes` are what is assigned)."""

    name: str
    module: str
    nodes: tuple[Node, ...]

    @property
    def node(self) -> Node:
        return self.nodes[-1]


Found = Module | Definition | Literal["unknown"] | None
"""None: there is no such name."""


@dataclass
class Names:
    """The names of a module's or a class's body."""

    defined: dict[str, list[Node]] = field(default_factory=dict)
    imported: dict[str, str] = field(default_factory=dict)
    stars: list[str] = field(default_factory=list)
    dynamic: bool = False


class Library:
    def __init__(self, folders: Iterable[Path]) -> None:
        self._folders = list(folders)
        self._names: dict[str, Names] = {}
        self._members: dict[tuple[str, str], Found] = {}
        self._bases: dict[Definition, list[Definition] | None] = {}

    @cached_property
    def _files(self) -> frozenset[str]:
        texts = (folder / CONTENTS for folder in self._folders)
        return frozenset(line for text in texts for line in text.read_text("utf-8").splitlines())

    @cached_property
    def roots(self) -> frozenset[str]:
        """The packages that can be imported."""
        return frozenset(
            name.partition("/")[0]
            for name in self._files
            if "/" in name and not name.partition("/")[0].endswith((".dist-info", ".data", ".libs"))
        )

    def module_file(self, module: str) -> Path | None:
        path = module.replace(".", "/")
        for name in (f"{path}/__init__.py", f"{path}.py", f"{path}/__init__.pyi", f"{path}.pyi"):
            if name in self._files:
                return next(f / name for f in self._folders if (f / name).is_file())
        return None

    def is_module(self, module: str) -> bool:
        return self.module_file(module) is not None or self._is_folder(module)

    def _is_folder(self, module: str) -> bool:
        return module in self._packages

    @cached_property
    def _packages(self) -> frozenset[str]:
        parents = (Path(n).parents for n in self._files if n.endswith((".py", ".pyi")))
        return frozenset(
            str(p).replace("/", ".") for each in parents for p in each if str(p) != "."
        )

    def is_compiled(self, module: str) -> bool:
        """A module of which the wheel has only a library."""
        return module in self._compiled

    @cached_property
    def _compiled(self) -> frozenset[str]:
        libraries = (name for name in self._files if name.endswith(".so"))
        return frozenset(name.partition(".")[0].replace("/", ".") for name in libraries)

    def sources(self, folder: str) -> Iterator[tuple[str, ast.Module]]:
        """A module, or those below a package, parsed."""
        path = folder.replace(".", "/")
        for name in sorted(self._files):
            if name.startswith((f"{path}/", f"{path}.py")) and name.endswith(".py"):
                module = name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
                file = self.module_file(module)
                if file is not None:
                    with suppress(SyntaxError):  # written for a newer Python than this one
                        yield module, ast.parse(file.read_text("utf-8"))

    def tree(self, module: str) -> ast.Module:
        """The source of a module, parsed; empty if it cannot be read."""
        file = self.module_file(module)
        with suppress(SyntaxError):  # written for a newer Python than this one
            return ast.parse(file.read_text("utf-8") if file is not None else "")
        return ast.Module([], [])

    def module_of(self, dotted: str) -> str | None:
        """The module in a dotted name, if there is one."""
        parts = dotted.split(".")
        starts = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
        return next((each for each in starts if self.is_module(each)), None)

    def elsewhere(self, dotted: str) -> list[str]:
        """Where the last part of a name is defined in other modules of its package."""
        root, last = dotted.partition(".")[0], dotted.rpartition(".")[2]
        defines = re.compile(rf"^(async def|def|class) {re.escape(last)}\b|^{last} *[:=]", re.M)
        modules = {
            name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
            for name in self._files
            if name.startswith(f"{root}/") and name.endswith(".py")
        }
        texts = {
            each: file.read_text("utf-8") for each in modules if (file := self.module_file(each))
        }
        found = {f"{each}.{last}" for each, text in texts.items() if defines.search(text)}
        return sorted(found | {each for each in modules if each.endswith(f".{last}")})

    def names(self, module: str) -> Names:
        if module not in self._names:
            file = self.module_file(module)
            self._names[module] = Names()
            if file is not None:
                source = file.read_text("utf-8")
                is_package = file.name.startswith("__init__")
                found = self._names[module]
                found.dynamic = any(mark in source for mark in _DYNAMIC)
                try:
                    _collect(ast.parse(source).body, found, module, is_package)
                except SyntaxError:  # written for a newer Python than this one
                    found.dynamic = True
                found.dynamic |= "__getattr__" in found.defined
            stub = self.module_file(module + "._C") if module == "torch" else None
            if stub is not None:  # torch takes its functions from there one by one
                self._names[module].stars += ["torch._C", "torch._C._VariableFunctions"]
        return self._names[module]

    def find(self, dotted: str, depth: int = 0) -> Found:
        parts = dotted.split(".")
        if depth > _DEPTH:
            return UNKNOWN
        for count in range(len(parts), 0, -1):
            module = ".".join(parts[:count])
            if self.is_module(module):
                return self._within(module, parts[count:], depth)
            if count > 1 and self.is_compiled(module):
                return UNKNOWN
        return None if parts[0] in self.roots else UNKNOWN

    def _within(self, module: str, rest: Sequence[str], depth: int) -> Found:
        if not rest:
            return Module(module)
        found = self.member(module, rest[0], depth + 1)
        for name in rest[1:]:
            if isinstance(found, Module):
                found = self.member(found.name, name, depth + 1)
            elif isinstance(found, Definition) and isinstance(found.node, ast.ClassDef):
                found = self.class_member(found, name, depth + 1)
            elif found is None:
                return None
            else:
                return UNKNOWN
        return found

    def member(self, module: str, name: str, depth: int = 0) -> Found:
        """A name of a module."""
        key = (module, name)
        if key not in self._members:
            self._members[key] = None  # for modules that import all names of each other
            self._members[key] = self._member(module, name, depth)
        return self._members[key]

    def _member(self, module: str, name: str, depth: int) -> Found:
        names = self.names(module)
        if name in names.defined:
            return Definition(name, module, tuple(names.defined[name]))
        if name in names.imported and names.imported[name] != f"{module}.{name}":
            return self.find(names.imported[name], depth + 1)
        if self.is_module(f"{module}.{name}"):
            return Module(f"{module}.{name}")
        if self.is_compiled(f"{module}.{name}") or name in ("__version__", "__name__", "__file__"):
            return UNKNOWN
        certain = not names.dynamic
        for star in names.stars:
            if star.partition(".")[0] not in self.roots or not self.is_module(star):
                certain = False
            elif depth < _DEPTH:
                found = self.member(star, name, depth + 1)
                if found is not None and found != UNKNOWN:
                    return found
                certain &= found is None
        return None if certain else UNKNOWN

    def bases(self, owner: Definition) -> list[Definition] | None:
        """The classes above, nearest first; None if one cannot be read."""
        if owner not in self._bases:
            self._bases[owner] = None  # for a class that is its own base
            self._bases[owner] = self._above(owner)
        return self._bases[owner]

    def _above(self, owner: Definition) -> list[Definition] | None:
        assert isinstance(owner.node, ast.ClassDef)
        above: list[Definition] = []
        for base in owner.node.bases:
            target = base.value if isinstance(base, ast.Subscript) else base
            text = ast.unparse(target)
            if text in ("object", "ABC", "Protocol", "Generic", "abc.ABC", "typing.Protocol"):
                continue
            found = self._named_in(owner.module, text)
            if not isinstance(found, Definition) or not isinstance(found.node, ast.ClassDef):
                return None
            if found == owner or (further := self.bases(found)) is None:
                return None
            above += [found, *further]
        return above

    def _named_in(self, module: str, text: str) -> Found:
        first, *rest = text.split(".")
        found = self.member(module, first)
        if isinstance(found, Module) and rest:
            return self.find(".".join([found.name, *rest]))
        return found if not rest else UNKNOWN

    def class_member(self, owner: Definition, name: str, depth: int = 0) -> Found:
        """A name of a class or of its instances."""
        above = self.bases(owner)
        for each in [owner, *(above or [])]:
            names = class_names(each)
            if name in names.defined:
                return Definition(name, each.module, tuple(names.defined[name]))
            if names.dynamic:
                return UNKNOWN
        return UNKNOWN if above is None or hasattr(object, name) else None


@cache
def class_names(owner: Definition) -> Names:
    """Names of the body, and the attributes that methods assign to `self`."""
    assert isinstance(owner.node, ast.ClassDef)
    names = Names()
    _collect(owner.node.body, names, owner.module, False)
    names.dynamic = bool({"__getattr__", "__getattribute__"} & names.defined.keys())
    decorators = (ast.unparse(each) for each in owner.node.decorator_list)
    names.dynamic |= any("attr" in text.partition("(")[0] for text in decorators)
    for node in ast.walk(owner.node):
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and isinstance(node.value, ast.Name)
            and node.value.id in ("self", "cls")
        ):
            names.defined.setdefault(node.attr, [node])
    return names


def _collect(body: Sequence[ast.stmt], names: Names, module: str, is_package: bool) -> None:
    for statement in body:
        match statement:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                names.defined.setdefault(statement.name, []).append(statement)
            case ast.Assign():
                for target in statement.targets:
                    for node in ast.walk(target):
                        if isinstance(node, ast.Name):
                            names.defined.setdefault(node.id, []).append(statement.value)
            case ast.AnnAssign(target=ast.Name(id=name)):
                names.defined.setdefault(name, []).append(statement.value or statement.annotation)
            case ast.Import():
                for alias in statement.names:
                    first = alias.name.partition(".")[0]
                    names.imported[alias.asname or first] = alias.name if alias.asname else first
            case ast.ImportFrom():
                source = absolute(statement, module, is_package)
                for alias in statement.names:
                    if alias.name == "*":
                        names.stars.append(source)
                    else:
                        names.imported[alias.asname or alias.name] = f"{source}.{alias.name}"
            case ast.If() | ast.Try() | ast.With() | ast.For() | ast.While():
                for part in ("body", "orelse", "finalbody"):
                    _collect(getattr(statement, part, []), names, module, is_package)
                for handler in getattr(statement, "handlers", []):
                    _collect(handler.body, names, module, is_package)


def absolute(statement: ast.ImportFrom, module: str, is_package: bool) -> str:
    """The module from which a statement imports."""
    if not statement.level:
        return statement.module or ""
    parts = module.split(".")
    kept = parts[: len(parts) - statement.level + is_package]
    return ".".join([*kept, *([statement.module] if statement.module else [])])
