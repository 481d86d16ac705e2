"""Reads a configuration from its sources: command line > environment > YAML files > default.

Invariant: a value overrides the values of the sources after it in that order, and every error names
the key, its value, its source and what to do.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from proxy.errors import ConfigurationError
from proxy.hub import model_folder
from proxy.section import Section
from trainer.config import TrainerConfig
from trainer.config_keys import keys_of
from trainer.config_successors import successor
from trainer.config_values import merged, shown
from trainer.errors import ConfigError

_NAMED = re.compile(r"^(agents|(?:agents\.[^.]+\.)?data\.(?:train|val)_sources)\.[^.]+")
"""A section that has a name of the user's own."""


def load(
    paths: Sequence[Path] = (),
    overrides: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> TrainerConfig:
    """The configuration from the YAML files, the environment and the command line. Later files
    override earlier ones. A model of the hub is downloaded; its path is that of its folder.

    Raises:
        ConfigError: names all wrong keys, or says why the model cannot be downloaded.
    """
    values, origin = merged(paths, overrides, environment or {})
    try:
        config = TrainerConfig.model_validate(values)
    except ValidationError as error:
        details = error.errors(include_url=False)
        problems = (problem for each in details for problem in _problems(each, values, origin))
        raise ConfigError(*problems) from error
    try:
        folder = model_folder(config.model.path)
    except ConfigurationError as error:
        raise ConfigError(f"model.path: {error}") from error
    return config.model_copy(update={"model": config.model.at(folder)})


def dump(config: Section) -> str:
    """A configuration with all keys, as YAML, from which `load` reads an equal configuration."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def _problems(
    detail: ErrorDetails, values: Mapping[str, Any], origin: Mapping[str, str]
) -> Iterator[str]:
    key, value = _key(detail["loc"], values), detail["input"]
    where = f" (from {_origin(key, origin)})" if key else ""
    if detail["type"] == "missing":
        yield f"{key}: missing; set it in the YAML file or as {key}=… on the command line"
    elif detail["type"] == "extra_forbidden":
        for each, given in _leaves(key, value):
            yield f"{each}={shown(each, given)}{where}: there is no such key{suggestion(each)}"
    else:
        message = detail["msg"].removeprefix("Value error, ")
        if key:
            yield f"{key}={shown(key, value)}{where}: {message}"
        else:  # one line for each contradiction between sections
            yield from message.splitlines()


def _key(loc: Sequence[str | int], values: Any) -> str:
    """The key as the user wrote it. Pydantic's location also contains the name of the chosen part,
    if a section is one of several parts."""
    *path, last = loc or ("",)
    parts: list[str] = []
    for part in path:
        is_inside = isinstance(values, Mapping) and part in values
        if not is_inside and not isinstance(part, int):
            continue  # the name of a chosen part
        values = values[part]
        parts.append(str(part))
    return ".".join([*parts, str(last)])


def _origin(key: str, origin: Mapping[str, str]) -> str:
    while key and key not in origin:
        key = key.rpartition(".")[0]
    return origin.get(key, "a default")


def suggestion(key: str) -> str:
    """The end of an error message that suggests the key that was probably meant."""
    if (here := successor(key)) is not None:
        return f"; here it is {here}"
    known = list(dict.fromkeys(each.dotted for each in keys_of(TrainerConfig)))
    known.sort(key=lambda each: each.count("."))
    section, _, name = key.rpartition(".")
    while not (inside := _inside(section, known)):  # a wrong section: its own name is compared
        section, _, name = section.rpartition(".")
    close = difflib.get_close_matches(name, inside, n=1, cutoff=0.7)
    close = close or [each for each in inside if len(name) > 2 and name in each]
    elsewhere = [each for each in known if _last(each) == _last(key)]
    nearest = [each for each in elsewhere if each.count(".") == elsewhere[0].count(".")]
    prefix = f"{section}." if section else ""
    if meant := [f"{prefix}{each}" for each in close] or nearest:
        return f"; did you mean {' or '.join(meant[:3])}?"
    if section and inside:
        return f"; {section} has: {', '.join(inside)}"
    return f"; the sections are: {', '.join(TrainerConfig.model_fields)}"


def _inside(section: str, known: Sequence[str]) -> list[str]:
    """The names of the keys in a section; of the sections, if `section` is empty."""
    generic = _NAMED.sub(r"\1.NAME", section)
    return [_last(each) for each in known if each.rpartition(".")[0] == generic]


def _last(key: str) -> str:
    return key.rpartition(".")[2]


def _leaves(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(value, Mapping) or not value:
        yield key, value
        return
    for name, inner in value.items():
        yield from _leaves(f"{key}.{name}", inner)
