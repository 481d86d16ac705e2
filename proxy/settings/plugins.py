"""Loads the parts that settings name by a short name or by an import path.

Invariant: a registry maps short names to import paths, so that nothing is imported before it is
used, and a part from outside the package (`package.module:name`) is loaded like a built-in one.

An installed package adds a short name by an entry point in the group `agentic_rl.KIND`:

    [project.entry-points."agentic_rl.advantage"]
    median = "my_package.advantages:median"
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any

from proxy.errors import ConfigurationError

GROUP = "agentic_rl"
"""The entry points of parts of a kind are in the group `agentic_rl.KIND`."""


def load_plugin(setting: str, name: str, known: Mapping[str, str], kind: str = "") -> Any:
    """Imports the object that `name` stands for; see `import_path`.

    Raises:
        ConfigurationError: `name` stands for nothing, or cannot be imported.
    """
    path = import_path(setting, name, known, kind)
    module, _, attribute = path.rpartition(":")
    try:
        return attrgetter(attribute)(_module(module))
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigurationError(f"{setting}: cannot import {path}: {error}") from error


def import_path(setting: str, name: str, known: Mapping[str, str], kind: str = "") -> str:
    """The import path that `name` stands for: `name` itself if it is `package.module:name` or
    `path/to/file.py:name`; else the path of the short name in `known`, or in the entry points that
    installed packages have for this kind of part. `setting` is the name of the setting, for the
    message.

    Raises:
        ConfigurationError: the short name is unknown, or several packages register it.
    """
    if name in known or ":" in name:
        return known.get(name, name)
    registered = _registered(kind)
    found = {point.value: point for point in registered if point.name == name}
    match list(found.values()):
        case [one]:
            return f"{one.module}:{one.attr}"
        case []:
            names = sorted({*known, *(point.name for point in registered)})
            use = f"use one of {', '.join(names)}, or" if names else "use"
            raise ConfigurationError(
                f"{setting}: {name!r} is unknown; {use} the import path of your own part, "
                "package.module:name"
            )
        case several:
            owners = ", ".join(
                f"{each.dist.name if each.dist else '?'} ({each.value})" for each in several
            )
            raise ConfigurationError(
                f"{setting}: several installed packages register {name!r} as {GROUP}.{kind}: "
                f"{owners}; use the import path of one of them"
            )


def _registered(kind: str) -> list[EntryPoint]:
    """The entry points of this kind of part; none for parts that packages cannot register."""
    return list(entry_points(group=f"{GROUP}.{kind}")) if kind else []


def _module(name: str) -> ModuleType:
    """The module with that name, or that file, which can import the modules in its folder."""
    if not name.endswith(".py"):
        return importlib.import_module(name)
    file = Path(name).resolve()
    if not file.is_file():
        raise ImportError(f"there is no file {file}")
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))
    module = importlib.import_module(file.stem)
    if module.__file__ is None or Path(module.__file__).resolve() != file:
        raise ImportError(
            f"another module has the name {file.stem!r}: {module.__file__}; rename it"
        )
    return module
