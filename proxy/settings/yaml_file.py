"""Reads YAML of settings.

Invariant: a file is read in full or not at all: a key that is given twice, a character that is not
UTF-8, or aliases without end are errors like any other fault of the file.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

MAX_VALUES = 1_000_000
"""Number of values in a file with its aliases written out, each of which takes about 100 bytes; a
few lines of nested aliases stand for billions."""
_MERGE = "tag:yaml.org,2002:merge"
_INTEGER = re.compile(r"[-+]?(0b[01_]+|0x[0-9a-fA-F_]+|0|[1-9][0-9_]*)$")
_FLOAT = re.compile(
    r"[-+]?(\.[0-9][0-9_]*|[0-9][0-9_]*\.[0-9_]*|(\.[0-9]+|[0-9]+(\.[0-9]*)?)[eE][-+]?[0-9]+)$"
    r"|[-+]?\.(inf|Inf|INF)$|\.(nan|NaN|NAN)$"
)
"""Numbers as in YAML 1.2. PyYAML, which reads YAML 1.1, takes 1e-3 for text, 1:30 for 90, and 010
for 8."""


def read_yaml(path: Path) -> Any:
    """The content of the file.

    Raises:
        OSError: the file cannot be read.
        yaml.YAMLError: it is not YAML, or a mapping in it has a key twice.
    """
    return yaml.load(path.read_bytes(), _Loader)


def parse_yaml(text: str) -> Any:
    """The value of a setting that is given as text. Raises yaml.YAMLError: it is not YAML."""
    return yaml.load(text, _Loader)


def yaml_fault(error: yaml.YAMLError) -> str:
    """What is wrong and where, without the lines of the file, which may contain a secret."""
    if not isinstance(error, yaml.MarkedYAMLError) or (mark := error.problem_mark) is None:
        return "it contains characters that YAML does not allow"
    return f"line {mark.line + 1}, column {mark.column + 1}: {error.problem}"


class _Loader(yaml.SafeLoader):
    def get_single_node(self) -> yaml.Node | None:
        try:
            node: yaml.Node | None = super().get_single_node()
            if node is not None:
                _values_of(node, {})
        except RecursionError:
            problem = "it is nested too deeply; a configuration has a few levels"
            raise yaml.composer.ComposerError(None, None, problem, self.get_mark()) from None
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ValueError, OverflowError, LookupError, AttributeError, TypeError):
            # A day of no month, thousands of digits, no digit at all: PyYAML checks none of it.
            problem = f"this is no {node.tag.rpartition(':')[2]} that can be read"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from None

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == _MERGE:
                continue
            if (key.tag, key.value) in seen:
                problem = f"the key {key.value!r} is given twice; keep one of them"
                raise yaml.composer.ComposerError(None, None, problem, key.start_mark)
            seen.add((key.tag, key.value))
        return node


def _values_of(node: yaml.Node, known: dict[int, int | None]) -> int:
    """Number of values that the node stands for, its aliases written out. `known`: those of the
    nodes that were seen; None: it is being counted.

    Raises yaml.composer.ComposerError: an alias contains itself, or there are too many.
    """
    if id(node) in known and (before := known[id(node)]) is not None:
        return before
    if id(node) in known:
        problem = "an alias contains itself"
        raise yaml.composer.ComposerError(None, None, problem, node.start_mark)
    known[id(node)] = None
    count = 1
    if isinstance(node, yaml.CollectionNode):
        for entry in node.value:
            parts = entry if isinstance(entry, tuple) else (entry,)
            count += sum(_values_of(part, known) for part in parts)
    if count > MAX_VALUES:
        problem = f"its aliases stand for more than {MAX_VALUES:,} values"
        raise yaml.composer.ComposerError(None, None, problem, node.start_mark)
    known[id(node)] = count
    return count


_NUMBERS = {
    f"tag:yaml.org,2002:{name}": kind for name, kind in (("int", _INTEGER), ("float", _FLOAT))
}
_Loader.yaml_implicit_resolvers = {
    first: [(tag, kind) for tag, kind in found if tag not in _NUMBERS]
    for first, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _tag, _kind in _NUMBERS.items():
    _Loader.add_implicit_resolver(_tag, _kind, list("-+.0123456789"))
