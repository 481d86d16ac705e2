"""Where a configuration comes from: command line > environment > YAML file > default.

Invariant: a value given in a nearer source stands, whatever the farther ones say, and every error
is one line that names the key, its value, where it came from and what to do.

Environment: `AGENTIC_TRAIN__SECTION__KEY`, and the names that users of verl's recipe know
(`VERL_NAMES`). Values, there and on the command line, are YAML: `8`, `1e-5`, `[a, b]`, `{k: v}`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from trainer.config import TrainerConfig
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
"""Environment variable → key. They mean what they mean in verl's recipe, except that the command
line wins over them."""

_EXPONENT = re.compile(r"^[+-]?\d+[eE][+-]?\d+$")


def load(
    path: Path | None, overrides: Sequence[str] = (), environment: Mapping[str, str] | None = None
) -> TrainerConfig:
    """
    Raises:
        ConfigError: one line.
    """
    sources = [
        _from_yaml(path) if path else {},
        _from_environment(environment or {}),
        _from_command_line(overrides),
    ]
    merged: dict[str, Any] = {}
    origin: dict[str, str] = {}
    names = [str(path), "the environment", "the command line"]
    for values, name in zip(sources, names, strict=True):
        _merge(merged, values, "", name, origin)
    try:
        return TrainerConfig.model_validate(merged)
    except ValidationError as error:
        raise ConfigError(_one_line(error, origin)) from error


def dump(config: TrainerConfig) -> str:
    """The resolved configuration as YAML, every key of it; `load` reads it back equal."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def _from_yaml(path: Path) -> dict[str, Any]:
    try:
        data = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(
            f"--config {path}: cannot be read ({error.strerror}); give a YAML file"
        ) from error
    except yaml.YAMLError as error:
        what = " ".join(str(error).split())
        raise ConfigError(f"--config {path}: not YAML: {what}") from error
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(f"--config {path}: its top level must map sections to keys")
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
        return float(text)  # YAML 1.1 takes 1e-5 for a string
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(
            f"{where}={text!r}: neither YAML nor JSON ({error.__class__.__name__}); quote it"
        ) from error


def _put(values: dict[str, Any], key: str, value: Any) -> None:
    *sections, last = key.split(".")
    for section in sections:
        values = values.setdefault(section, {})
        if not isinstance(values, dict):
            raise ConfigError(f"{key}: {section} is given as a value and as a section")
    values[last] = value


def _merge(
    into: dict[str, Any], values: Mapping[str, Any], prefix: str, name: str, origin: dict[str, str]
) -> None:
    """Deep: mappings are merged key by key, anything else replaces what was there."""
    for key, value in values.items():
        path = f"{prefix}{key}"
        origin[path] = name
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge(into[key], value, f"{path}.", name, origin)
            continue
        into[key] = _copied(value)


def _copied(value: Any) -> Any:
    return {k: _copied(v) for k, v in value.items()} if isinstance(value, dict) else value


def _one_line(error: ValidationError, origin: Mapping[str, str]) -> str:
    first = error.errors(include_url=False)[0]
    key = ".".join(str(part) for part in first["loc"])
    if first["type"] == "missing":
        return f"{key}: missing; set it in the YAML file or as {key}=… on the command line"
    shown = repr(first["input"])
    given = f"{key}={shown[:100]}" if key else ""
    where = f" (from {_origin(key, origin)})" if key else ""
    if first["type"] == "extra_forbidden":
        return f"{given}{where}: there is no such key{_suggestion(key)}"
    message = first["msg"].removeprefix("Value error, ")
    return f"{given}{where}: {message}" if key else message


def _origin(key: str, origin: Mapping[str, str]) -> str:
    while key and key not in origin:
        key = key.rpartition(".")[0]
    return origin.get(key, "a default")


def _suggestion(key: str) -> str:
    known = list(_keys(TrainerConfig, ""))
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    if close:
        return f"; did you mean {close[0]}?"
    section = key.partition(".")[0]
    inside = [k.partition(".")[2] for k in known if k.startswith(f"{section}.")]
    return f"; {section} has: {', '.join(inside)}" if inside else "; remove it"


def _keys(model: type[BaseModel], prefix: str) -> list[str]:
    keys = []
    for name, field in model.model_fields.items():
        nested = field.annotation
        if isinstance(nested, type) and issubclass(nested, BaseModel):
            keys += _keys(nested, f"{prefix}{name}.")
        else:
            keys.append(f"{prefix}{name}")
    return keys
