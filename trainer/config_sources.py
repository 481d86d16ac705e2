"""Reads a configuration from its sources: command line > environment > YAML files > default.

Invariant: a value overrides the values of the sources after it in that order, and every error names
the key, its value, its source and what to do.

Environment variables are `AGENTIC_TRAIN__SECTION__KEY` and the names of verl's recipe
(`VERL_NAMES`). Their values and those on the command line are YAML: `8`, `1e-5`, `[a, b]`,
`{k: v}`.
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
from proxy.shown_config import HIDDEN, is_secret, without_secrets, yaml_fault
from trainer.config import TrainerConfig
from trainer.config_keys import keys_of
from trainer.config_successors import successor
from trainer.errors import ConfigError

ENV_PREFIX = "AGENTIC_TRAIN__"

VERL_NAMES: Mapping[str, str] = {
    "LLM_PROXY_IP": "proxy_server.llm_proxy_ip",
    "PROXY_SERVER_URL": "proxy_server.url",
    "HARBOR_SERVER_URL": "remote_agent.harbor_server_url",
    "HARBOR_SERVER_TIMEOUT": "remote_agent.harbor_server_timeout",
    "HARBOR_DATASET_DIRS": "data.harbor_dataset_dirs",
    "REMOTE_AGENT_NAME": "remote_agent.agent_name",
    "REMOTE_AGENT_IMPORT_PATH": "remote_agent.agent_import_path",
    "REMOTE_AGENT_KWARGS": "remote_agent.agent_kwargs",
    "REMOTE_AGENT_MAX_RETRIES": "remote_agent.max_retries",
    "REMOTE_AGENT_RETRY_BASE_DELAY": "remote_agent.retry_base_delay",
    "REMOTE_AGENT_TASK_PATH_TEMPLATE": "remote_agent.task_path_template",
    "REMOTE_AGENT_ENVIRONMENT_OVERRIDES": "remote_agent.environment_overrides",
    "REMOTE_AGENT_ENVIRONMENT_KWARGS": "remote_agent.environment_kwargs",
    "REMOTE_AGENT_ENVIRONMENT_IMPORT_PATH": "remote_agent.environment_import_path",
    "REMOTE_AGENT_USE_LOCAL_TRIAL": "remote_agent.use_local_trial",
    "REMOTE_MODEL_NAME": "remote_agent.model_name",
}
"""Environment variable of verl's recipe → key. The variables keep their meaning, except that the
command line overrides them."""

_NAMED = re.compile(r"^(agents|(?:agents\.[^.]+\.)?data\.(?:train|val)_sources)\.[^.]+")
"""A section that has a name of the user's own."""
_EXPONENT = re.compile(r"^[+-]?\d+[eE][+-]?\d+$")


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
    sources = [(f"{path}", _from_yaml(path)) for path in paths]
    sources.append(("the environment", _from_environment(environment or {})))
    sources.append(("the command line", _from_command_line(overrides)))
    merged: dict[str, Any] = {}
    origin: dict[str, str] = {}
    for name, values in sources:
        _merge(merged, values, "", name, origin)
    try:
        config = TrainerConfig.model_validate(merged)
    except ValidationError as error:
        details = error.errors(include_url=False)
        problems = (problem for each in details for problem in _problems(each, merged, origin))
        raise ConfigError(*problems) from error
    try:
        folder = model_folder(config.model.path)
    except ConfigurationError as error:
        raise ConfigError(f"model.path: {error}") from error
    model = config.model.model_copy(update={"path": folder})
    return config.model_copy(update={"model": model})


def dump(config: Section) -> str:
    """A configuration with all keys, as YAML, from which `load` reads an equal configuration."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def _from_yaml(path: Path) -> dict[str, Any]:
    try:
        data = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(
            f"--config {path}: cannot be read ({error.strerror}); give a YAML file"
        ) from error
    except yaml.YAMLError as error:
        raise ConfigError(f"--config {path}: not YAML: {yaml_fault(error)}") from error
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(
            f"--config {path}: the file must map sections to keys, as in agentic_trainer.yaml"
        )
    return data


def _from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, text in environment.items():
        if name in VERL_NAMES:
            key = VERL_NAMES[name]
        elif name.startswith(ENV_PREFIX):
            key = name.removeprefix(ENV_PREFIX).lower().replace("__", ".")
        else:
            continue
        _put(values, key, _value(text, f"environment {name}"))
    return values


def _from_command_line(overrides: Sequence[str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for argument in overrides:
        key, equals, text = argument.partition("=")
        if not equals or not key:
            raise ConfigError(f"{argument!r}: overrides are key=value, like rollout.group_size=8")
        _put(values, key, _value(text, key))
    return values


def _value(text: str, where: str) -> Any:
    if _EXPONENT.match(text):
        return float(text)  # YAML 1.1 reads 1e-5 as a string
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(
            f"{where}={_shown(where, text)}: not YAML ({error.__class__.__name__}); "
            "put it in quotes"
        ) from error


def _put(values: dict[str, Any], key: str, value: Any) -> None:
    *sections, last = key.split(".")
    for section in sections:
        values = values.setdefault(section, {})
        if not isinstance(values, dict):
            raise ConfigError(f"{key}: {section} is set both as a value and as a section")
    values[last] = value


def _merge(
    into: dict[str, Any], values: Mapping[str, Any], prefix: str, name: str, origin: dict[str, str]
) -> None:
    """Merges mappings key by key; any other value replaces the one that was there."""
    for key, value in values.items():
        path = f"{prefix}{key}"
        origin[path] = name
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge(into[key], value, f"{path}.", name, origin)
            continue
        into[key] = _copied(value)


def _copied(value: Any) -> Any:
    return {k: _copied(v) for k, v in value.items()} if isinstance(value, dict) else value


def _problems(
    detail: ErrorDetails, values: Mapping[str, Any], origin: Mapping[str, str]
) -> Iterator[str]:
    key, value = _key(detail["loc"], values), detail["input"]
    where = f" (from {_origin(key, origin)})" if key else ""
    if detail["type"] == "missing":
        yield f"{key}: missing; set it in the YAML file or as {key}=… on the command line"
    elif detail["type"] == "extra_forbidden":
        for each, given in _leaves(key, value):
            yield f"{each}={_shown(each, given)}{where}: there is no such key{suggestion(each)}"
    else:
        message = detail["msg"].removeprefix("Value error, ")
        if key:
            yield f"{key}={_shown(key, value)}{where}: {message}"
        else:  # one line for each contradiction between sections
            yield from message.splitlines()


def _shown(key: str, value: Any) -> str:
    """The value of a key as a message shows it, without secrets."""
    name = key.rpartition(".")[2]
    return HIDDEN if is_secret(name, value) else f"{without_secrets(value)!r:.100}"


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
