"""Loads the parts that settings name by a short name or by an import path.

Invariant: a registry maps short names to import paths, so that nothing is imported before it is
used, and a part from outside the package (`package.module:name`) is loaded like a built-in one.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any

from proxy.errors import ConfigurationError


def load_plugin(setting: str, name: str, known: Mapping[str, str]) -> Any:
    """Imports the object that `name` stands for: a short name in `known` (short name → import
    path), an import path `package.module:name`, or `path/to/file.py:name`.

    Raises:
        ConfigurationError: `name` is neither, or cannot be imported. `setting` is the name of the
            setting, for the message.
    """
    path = known.get(name, name)
    module, separator, attribute = path.rpartition(":")
    if not separator:
        raise ConfigurationError(
            f"{setting}: {name!r} is unknown; use one of {', '.join(sorted(known))}, or the import"
            " path of your own part, package.module:name"
        )
    try:
        return attrgetter(attribute)(_module(module))
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigurationError(f"{setting}: cannot import {path}: {error}") from error


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
