"""Reads YAML of settings.

Invariant: a file is read in full or not at all: a key that is given twice, or a character that is
not UTF-8, is an error like any other fault of the file.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

_MERGE = "tag:yaml.org,2002:merge"
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)[eE][-+]?[0-9]+$")
"""A number with an exponent as in YAML 1.2; PyYAML, which reads YAML 1.1, takes 1e-3 for text."""


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


_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))
