"""One of the page's modules and all that it imports, as one script for a file without a server.

    import { number as n } from "./format.js";   →  const { number: n } = module_1;
    export const count = …;                      →  const count = …;  return { count: count };

Browsers do not load modules from a file that was opened without a server. Invariant: each module
is a function of its own, so that names of different modules do not collide.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable

_IMPORT = re.compile(r'^import\s*(\{[^}]*\}|\w+)\s*from\s*"(\.[^"]+)";?', re.MULTILINE)
_EXPORT_ALL = re.compile(r'^export \* from "(\.[^"]+)";', re.MULTILINE)
_EXPORT_DEFAULT = re.compile(r"\bexport default ")
_EXPORT_LIST = re.compile(r"\bexport\s*\{([^}]*)\};?")
_EXPORT = re.compile(r"^export ((?:async )?function|const|class) (\w+)", re.MULTILINE)
_AS = re.compile(r"\s+as\s+")
_LEFT_OVER = re.compile(r"^(import|export)\b", re.MULTILINE)


def one_script(entry: str, source: Callable[[str], str]) -> str:
    """`source` returns a module's text by its path, such as `vendor/preact.js`.

    Raises:
        ValueError: a module has a form of import or export that is not known here, modules import
            each other in a circle, or the text would end a script element.
    """
    modules: dict[str, int] = {}
    parts: list[str] = []
    _add(entry, source, modules, parts, ())
    script = '"use strict";\n' + "\n".join(parts)
    if re.search(r"</script|<!--", script, re.IGNORECASE):
        raise ValueError("a module of the page has the text </script or <!--")
    return script


def _add(
    path: str,
    source: Callable[[str], str],
    modules: dict[str, int],
    parts: list[str],
    above: tuple[str, ...],
) -> None:
    """Adds the modules that a module imports, and then the module."""
    if path in above:
        raise ValueError(f"modules import each other: {' → '.join([*above, path])}")
    if path in modules:
        return
    text = source(path)

    def number(relative: str) -> int:
        other = posixpath.normpath(posixpath.join(posixpath.dirname(path), relative))
        _add(other, source, modules, parts, (*above, path))
        return modules[other]

    def imported(found: re.Match[str]) -> str:
        names, place = found[1], f"module_{number(found[2])}"
        if not names.startswith("{"):
            return f"const {names} = {place}.default;"
        return f"const {_AS.sub(': ', names)} = {place};"

    given: list[str] = []

    def exported(found: re.Match[str]) -> str:
        given.append(f"{found[2]}: {found[2]}")
        return f"{found[1]} {found[2]}"

    def listed(found: re.Match[str]) -> str:
        pairs = [each.split(" as ") for each in found[1].split(",") if each.strip()]
        given.extend(f"{names[-1].strip()}: {names[0].strip()}" for names in pairs)
        return ""

    def everything(found: re.Match[str]) -> str:
        given.append(f"...module_{number(found[1])}")
        return ""

    text = _IMPORT.sub(imported, text)
    text = _EXPORT_ALL.sub(everything, text)
    text, defaults = _EXPORT_DEFAULT.subn("const default_export = ", text)
    given += ["default: default_export"] * defaults
    text = _EXPORT.sub(exported, _EXPORT_LIST.sub(listed, text))
    if left := _LEFT_OVER.search(text):
        line = text[left.start() :].partition("\n")[0]
        raise ValueError(f"{path}: {line!r} is not a form of import or export that is known")
    modules[path] = len(modules)
    result = f"return {{ {', '.join(given)} }};"
    parts.append(f"const module_{modules[path]} = (() => {{\n{text}\n{result}\n}})();")
