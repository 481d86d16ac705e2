"""Lists the keys of the configuration that nothing here sets: `python -m tests.unset_keys`.

A key is set where a user would read it: in a YAML file of the examples, benchmarks, images and
manifests, in a YAML block, a dictionary or a `key=value` of those, of the pages for users and of
the templates of `agentic-train init`, as a variable of the environment, or as a flag of
`agentic-proxy serve`. Tests do not count. A key of a part is found by its part's name and its own.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from trainer.settings.reference import Page
from trainer.settings.sources import Key
from trainer.settings.values import ENV_PREFIX, VERL_NAMES

ROOT = Path(__file__).parents[1]
PLACES = (
    *("agentic_trainer.yaml", "README.md", "Makefile", "docs/**/*.md", "k8s/**/*.yaml"),
    *("docker/*.yaml", "docker/*.Dockerfile", "examples/**/*", "benchmarks/**/*"),
    "trainer/commands/init_project.py",
)
GENERATED = {ROOT / "docs/configuration.md"}
NOTES = ROOT / "docs/notes"
_BLOCK = re.compile(r"^```ya?ml[^\n]*\n(.*?)^```$", re.M | re.S)
_WORD = re.compile(r"(?<![\w.])((?:[a-z_]\w*\.)+[a-z_]\w*)=")
_VARIABLE = re.compile(rf"\b(?:{ENV_PREFIX}|AGENTIC_PROXY_)([A-Z0-9_]+)\b")
_FLAG = re.compile(r"(?<!\w)--([a-z]+(?:-[a-z]+)*)\b")


def unset_keys() -> list[Key]:
    """The listed keys that are set nowhere."""
    given = set(_set_paths())
    page = Page()
    found = []
    for keys, of_proxy in ((page.run, False), (page.proxy, True)):
        by_definition = [key for key in keys if page.lists(key)]
        for key in by_definition:
            same = [each for each in (*page.run, *page.proxy) if each.definition == key.definition]
            if (key.sections and "." not in key.path) or any(_is_set(each, given) for each in same):
                continue
            if of_proxy or not key.sections:
                found.append(key)
    return found


def _is_set(key: Key, given: set[str]) -> bool:
    words = [word for word in key.dotted.split(".") if word != "NAME"]
    if len(words) == 1:
        return words[0] in given
    return ".".join(words[-2:]) in given


def _set_paths() -> Iterator[str]:
    """The last two names of each path that is set, and the whole of those with one name."""
    for path in sorted({path for place in PLACES for path in ROOT.glob(place)} - GENERATED):
        if not path.is_file() or path.suffix in (".jsonl", ".png", ".safetensors"):
            continue
        if NOTES in path.parents and path.name != "recipes.md":
            continue
        text = path.read_text("utf-8", errors="replace")
        for tree in _trees(path, text):
            yield from _ends(tree)
        for name in _WORD.findall(text):
            yield ".".join(name.split(".")[-2:])
        for name in _VARIABLE.findall(text):
            yield ".".join(name.lower().split("__")[-2:])
        for name, key in VERL_NAMES.items():
            if name in text:
                yield ".".join(key.split(".")[-2:])
        yield from (name.replace("-", "_") for name in _FLAG.findall(text))


def _trees(path: Path, text: str) -> Iterator[Any]:
    """The mappings that the file holds."""
    if path.suffix in (".yaml", ".yml"):
        yield from _yaml(text)
    elif path.suffix == ".md":
        for block in _BLOCK.findall(text):
            yield from _yaml(block)
    elif path.suffix == ".ipynb":
        for cell in json.loads(text)["cells"]:
            yield from _dictionaries("".join(cell["source"]))
    elif path.suffix == ".py":
        yield from _dictionaries(text)


def _yaml(text: str) -> Iterator[Any]:
    try:
        for tree in yaml.safe_load_all(text):
            yield tree
            yield from _inner_yaml(tree)
    except yaml.YAMLError:
        return  # a template


def _inner_yaml(tree: Any) -> Iterator[Any]:
    """The YAML in the strings of a manifest, such as a ConfigMap."""
    for value in tree.values() if isinstance(tree, Mapping) else tree if _is_list(tree) else ():
        if isinstance(value, str) and "\n" in value and ":" in value:
            yield from _yaml(value)
        else:
            yield from _inner_yaml(value)


def _is_list(tree: Any) -> bool:
    return isinstance(tree, list | tuple)


def _dictionaries(source: str) -> Iterator[Any]:
    """Each literal dictionary of a program, with None in place of other values, and the keyword
    arguments of each call under the last name of what is called."""
    try:
        nodes = list(ast.walk(ast.parse(source)))
    except SyntaxError:
        return
    for node in nodes:
        if isinstance(node, ast.Dict):
            yield _literal(node)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and "\n" in node.value:
            yield from _yaml(node.value)


def _literal(node: ast.expr) -> Any:
    if isinstance(node, ast.Dict):
        pairs = zip(node.keys, node.values, strict=True)
        return {
            key.value: _literal(value)
            for key, value in pairs
            if isinstance(key, ast.Constant) and isinstance(key.value, str)
        }
    return [_literal(each) for each in node.elts] if isinstance(node, ast.List) else None


def _ends(tree: Any, section: str = "") -> Iterator[str]:
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            name = str(key)
            yield from (f"{section}.{last}" for last in (name, *name.split(".")[-1:]) if section)
            yield name
            yield ".".join(name.split(".")[-2:])
            yield from _ends(value, name.split(".")[-1])
    elif _is_list(tree):
        for each in tree:
            yield from _ends(each, section)


def main() -> None:
    for key in unset_keys():
        print(key.path)


if __name__ == "__main__":
    main()
