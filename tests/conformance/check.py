"""Compares what our code uses with what packages define."""

from __future__ import annotations

import ast
import gc
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from tests.conformance.library import UNKNOWN, Definition, Library, Module, class_names
from tests.conformance.uses import Stand, Use, Uses

Function = ast.FunctionDef | ast.AsyncFunctionDef
_FIELDS = ("dataclass", "config", "define", "frozen", "attr.s", "attrs")
"""Decorators of classes whose fields are their arguments."""
_FEW = 4
"""A name that stands in this many other modules says nothing about where the missing one went."""


@dataclass
class Outcome:
    faults: list[str] = field(default_factory=list)
    checked: int = 0
    unknown: int = 0
    """What their source does not tell: compiled code, and names that are made at run time."""


@dataclass(frozen=True)
class Signature:
    positional: tuple[str, ...]
    required: frozenset[str]
    keywords: frozenset[str]
    takes_more: bool
    takes_any_keyword: bool
    defaults: tuple[tuple[str, str], ...]


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Syntax trees are millions of objects without cycles; looking for cycles among them would take
    most of the time."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@_without_garbage_collection()
def check(uses: Uses, library: Library) -> Outcome:
    outcome = Outcome()
    for use in uses.names:
        _name(use, library, outcome)
    modules = {module for use in uses.names if (module := library.module_of(use.name))}
    for stand in uses.stands:
        _stand(stand, library, modules, outcome)
    of_server = flags(library)
    for kind, used, offered in (
        ("flag", uses.flags, of_server),
        ("flag", uses.load_flags, of_server | strings(library, "vllm.benchmarks")),
        ("route", uses.routes, strings(library, "vllm.entrypoints")),
        ("variable", uses.variables, strings(library, "vllm.envs")),
    ):
        for each, where in used.items():
            outcome.checked += 1
            if each not in offered and not (kind == "flag" and _abbreviates(each, offered)):
                outcome.faults.append(f"{where}: vLLM has no {kind} {each}")
    outcome.faults = sorted(set(outcome.faults))
    return outcome


def _name(use: Use, library: Library, outcome: Outcome) -> None:
    outcome.checked += 1
    found = library.find(use.name)
    if found == UNKNOWN:
        outcome.unknown += 1
    elif found is None:
        places = library.elsewhere(use.name)
        hint = f", but {' and '.join(places)}" if 0 < len(places) < _FEW else ""
        outcome.faults.append(f"{use.where}: there is no {use.name}{hint}")
    elif use.call is not None and isinstance(found, Definition):
        signatures = list(signatures_of(found, library, is_bound=_is_bound(use, found, library)))
        wrong = [_refused(use.call, signature) for signature in signatures]
        if wrong and all(wrong):
            outcome.faults.append(f"{use.where}: {use.name} {wrong[-1]}")


def _is_bound(use: Use, found: Definition, library: Library) -> bool:
    """Whether the first parameter of a method is given by the call's object."""
    owner = library.find(use.name.rpartition(".")[0])
    in_class = isinstance(owner, Definition) and isinstance(owner.node, ast.ClassDef)
    decorated = _decorators(found.node) if isinstance(found.node, Function) else set()
    if "staticmethod" in decorated or not in_class:
        return False
    return use.is_bound or "classmethod" in decorated


def _decorators(node: Function | ast.ClassDef) -> set[str]:
    names = (ast.unparse(each).partition("(")[0] for each in node.decorator_list)
    return {name.rpartition(".")[2] for name in names}


def signatures_of(found: Definition, library: Library, *, is_bound: bool) -> Iterator[Signature]:
    """Each overload, or one; nothing if the source does not tell how it is called."""
    if isinstance(found.node, ast.ClassDef):
        yield from _constructor(found, library)
        return
    functions = [node for node in found.nodes if isinstance(node, Function)]
    overloads = [node for node in functions if "overload" in _decorators(node)]
    for node in overloads or functions[-1:]:
        if _decorators(node) <= {"overload", "staticmethod", "classmethod", "no_grad", "cache"}:
            yield signature(node, skip=int(is_bound))


def _constructor(found: Definition, library: Library) -> Iterator[Signature]:
    above = library.bases(found)
    if above is None:
        return
    order = [found, *above]
    for each in order:
        names = class_names(each)
        assert isinstance(each.node, ast.ClassDef)
        for method in ("__init__", "__new__"):
            nodes = [n for n in names.defined.get(method, []) if isinstance(n, Function)]
            overloads = [node for node in nodes if "overload" in _decorators(node)]
            if nodes:
                yield from (signature(node, skip=1) for node in overloads or nodes[-1:])
                return
        if _decorators(each.node) & set(_FIELDS):
            yield _of_fields(order, library)
            return


def _of_fields(order: list[Definition], library: Library) -> Signature:
    names: dict[str, ast.expr | None] = {}
    for each in reversed(order):
        assert isinstance(each.node, ast.ClassDef)
        for statement in each.node.body:
            match statement:
                case ast.AnnAssign(target=ast.Name(id=name), value=value):
                    of_class = "ClassVar" in ast.unparse(statement.annotation)
                    if not of_class and not _says(value, "init=False"):
                        names[name] = value
    defaults = {n: text for n, value in names.items() if (text := _default_of(value)) is not None}
    named = tuple(n for n, value in names.items() if not _says(value, "kw_only=True"))
    required = frozenset(names) - defaults.keys()
    return Signature(named, required, frozenset(names), False, False, tuple(defaults.items()))


def _says(field_value: ast.expr | None, text: str) -> bool:
    return field_value is not None and text in ast.unparse(field_value)


def _default_of(field_value: ast.expr | None) -> str | None:
    """The default of a dataclass's field, also of one that says more, like `field(default=1)`."""
    if isinstance(field_value, ast.Call):
        given = {each.arg: ast.unparse(each.value) for each in field_value.keywords}
        for each in ("default", "default_factory"):
            if each in given:
                return given[each]
        if ast.unparse(field_value.func).endswith("field"):
            return None
    return None if field_value is None else ast.unparse(field_value)


def signature(node: Function, skip: int) -> Signature:
    given = node.args
    positional = [each.arg for each in (*given.posonlyargs, *given.args)]
    values = [ast.unparse(each) for each in given.defaults]
    defaults = dict(zip(positional[len(positional) - len(values) :], values, strict=True))
    for each, value in zip(given.kwonlyargs, given.kw_defaults, strict=True):
        if value is not None:
            defaults[each.arg] = ast.unparse(value)
    positional = positional[skip:]
    every = [*positional, *(each.arg for each in given.kwonlyargs)]
    only_positional = {each.arg for each in given.posonlyargs}
    return Signature(
        tuple(positional),
        frozenset(every) - defaults.keys(),
        frozenset(every) - only_positional,
        given.vararg is not None,
        given.kwarg is not None,
        tuple(sorted(defaults.items())),
    )


def _refused(call: ast.Call, to: Signature) -> str | None:
    """Why the call does not fit the signature."""
    starred = any(isinstance(each, ast.Starred) for each in call.args)
    keywords = {each.arg for each in call.keywords if each.arg is not None}
    unpacked = any(each.arg is None for each in call.keywords)
    count = sum(not isinstance(each, ast.Starred) for each in call.args)
    if count > len(to.positional) and not to.takes_more:
        return f"takes {len(to.positional)} arguments by position, not {count}"
    if not to.takes_any_keyword and (wrong := keywords - to.keywords):
        return f"has no argument {', '.join(sorted(wrong))}"
    missing = to.required - set(to.positional[:count]) - keywords
    if missing and not starred and not unpacked:
        return f"needs the argument {', '.join(sorted(missing))}"
    return None


def _stand(stand: Stand, library: Library, modules: set[str], outcome: Outcome) -> None:
    """modules: those of theirs that our code imports, and to which our class may be given."""
    outcome.checked += 1
    found = library.find(stand.base)
    if found == UNKNOWN or (
        isinstance(found, Definition) and not isinstance(found.node, ast.ClassDef)
    ):
        outcome.unknown += 1
        return
    if not isinstance(found, Definition):
        outcome.faults.append(f"{stand.where}: there is no {stand.base}")
        return
    theirs = _members([found, *(library.bases(found) or [])])
    own = Definition(stand.node.name, "", (stand.node,))
    ours = _members([own])
    given = class_names(own).defined
    asked = set() if stand.is_subclass else _asked_of(stand.base, library, modules)
    for name, node in theirs.items():
        if name not in given and (name in asked or "abstractmethod" in _decorators(node)):
            outcome.faults.append(f"{stand.where}: {stand.node.name} lacks {stand.base}.{name}")
        elif name in ours and name != "__init__":
            wrong = _overridden(node, ours[name])
            if wrong:
                outcome.faults.append(f"{stand.where}: {stand.node.name}.{name} {wrong}")


def _asked_of(base: str, library: Library, modules: set[str]) -> set[str]:
    """What modules read of arguments whose annotation names a class. A class that only stands in
    for it inherits nothing, so that it needs these even if they are not abstract."""
    name = re.compile(rf"\b{base.rpartition('.')[2]}\b")
    return {
        node.attr
        for module in modules
        if base.startswith(f"{module.partition('.')[0]}.")
        for function in ast.walk(library.tree(module))
        if isinstance(function, Function)
        for given in (*function.args.args, *function.args.kwonlyargs)
        if given.annotation is not None and name.search(ast.unparse(given.annotation))
        for node in ast.walk(function)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == given.arg
    }


def _members(order: list[Definition]) -> dict[str, Function]:
    found: dict[str, Function] = {}
    for each in reversed(order):
        for name, nodes in class_names(each).defined.items():
            if isinstance(nodes[-1], Function):
                found[name] = nodes[-1]
            else:
                found.pop(name, None)
    return found


def _overridden(theirs: Function, ours: Function) -> str | None:
    """Why our method cannot be called as theirs is."""
    properties = {"property", "cached_property"}
    is_property = bool(_decorators(theirs) & properties)
    if is_property != bool(_decorators(ours) & properties):
        return f"must {'' if is_property else 'not '}be a property"
    if isinstance(theirs, ast.AsyncFunctionDef) and not isinstance(ours, ast.AsyncFunctionDef):
        return "must be async"
    skip = int("staticmethod" not in _decorators(theirs))
    base, own = signature(theirs, skip), signature(ours, skip)
    if base.takes_more and base.takes_any_keyword:
        return None  # each subclass has arguments of its own
    by_name = own.takes_any_keyword or set(base.positional) <= own.keywords
    if len(own.positional) < len(base.positional) and not own.takes_more and not by_name:
        return f"takes {len(own.positional)} arguments by position, not {len(base.positional)}"
    only_named = base.keywords - set(base.positional)
    if not own.takes_any_keyword and (lacks := only_named - own.keywords):
        return f"has no argument {', '.join(sorted(lacks))}"
    given = own.positional if base.takes_more else own.positional[: len(base.positional)]
    if more := own.required - base.keywords - set(given):
        return f"needs the argument {', '.join(sorted(more))}"
    return None


def flags(library: Library) -> set[str]:
    """The flags of `vllm serve`: written ones, and the fields of its classes of arguments."""
    found = strings(library, "vllm.entrypoints") | strings(library, "vllm.engine")
    found = {each for each in found if each.startswith("--")}
    for folder in ("vllm.entrypoints", "vllm.engine"):
        for _, tree in library.sources(folder):
            for node in ast.walk(tree):
                if isinstance(node, ast.ClassDef) and "Args" in node.name:
                    fields = [s.target for s in node.body if isinstance(s, ast.AnnAssign)]
                    names = (each.id for each in fields if isinstance(each, ast.Name))
                    found |= {f"--{name.replace('_', '-')}" for name in names}
    return found


def _abbreviates(flag: str, offered: set[str]) -> bool:
    """argparse accepts the beginning of a flag."""
    return any(each.startswith(flag) for each in offered)


def strings(library: Library, folder: str) -> set[str]:
    """Every string in the source of a module, or below a package."""
    return {
        node.value
        for _, tree in library.sources(folder)
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }


def changed_defaults(uses: Uses, before: Library, after: Library) -> list[str]:
    """Arguments that our calls leave out, whose default is another one in the newer version."""
    changes = set()
    for use in uses.names:
        if use.call is None:
            continue
        old, new = (_defaults(use, library) for library in (before, after))
        given = {each.arg for each in use.call.keywords}
        for name, value in old.items():
            if name in new and new[name] != value and name not in given:
                changes.add(f"{use.where}: {use.name}({name}={value}) is now {new[name]}")
    return sorted(changes)


def _defaults(use: Use, library: Library) -> dict[str, str]:
    found = library.find(use.name)
    if not isinstance(found, Definition) or isinstance(found, Module):
        return {}
    several = list(signatures_of(found, library, is_bound=False))
    return dict(several[0].defaults) if len(several) == 1 else {}
