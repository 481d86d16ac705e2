"""Loads the parts that settings name by a short name or by an import path.

Invariant: a registry maps short names to import paths, so that nothing is imported before it is
used, and a part from outside the package (`package.module:name`) is loaded like a built-in one.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from operator import attrgetter
from typing import Any

from proxy.errors import ConfigurationError


def load_plugin(setting: str, name: str, known: Mapping[str, str]) -> Any:
    """Imports the object that `name` stands for: a short name in `known` (short name → import
    path), or an import path `package.module:name`.

    Raises:
        ConfigurationError: `name` is neither, or cannot be imported. `setting` is the name of the
            setting, for the message.
    """
    path = known.get(name, name)
    module, separator, attribute = path.partition(":")
    if not separator:
        raise ConfigurationError(
            f"{setting}: {name!r} is unknown; use one of {', '.join(sorted(known))}, or the import"
            " path of your own part, package.module:name"
        )
    try:
        return attrgetter(attribute)(importlib.import_module(module))
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigurationError(f"{setting}: cannot import {path}: {error}") from error
