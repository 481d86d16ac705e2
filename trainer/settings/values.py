"""The keys and values of a configuration, merged from its sources and not checked yet.

Sources: command line > environment > YAML files. Environment variables are
`AGENTIC_TRAIN__SECTION__KEY` and the names of verl's recipe (`VERL_NAMES`). Their values and those
on the command line are YAML: `8`, `1e-5`, `[a, b]`, `{k: v}`.

This module imports nothing of the trainer's own sections, which need seconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from proxy.machine.secrecy import HIDDEN, is_secret, without_secrets
from proxy.settings.yaml_file import parse_yaml, read_yaml, yaml_fault
from trainer.errors import ConfigError

ENV_PREFIX = "AGENTIC_TRAIN__"

VERL_NAMES: Mapping[str, str] = {
    "LLM_PROXY_IP": "proxy_server.llm_proxy_ip",
    "PROXY_SERVER_URL": "proxy_server.url",
    "HARBOR_SERVER_URL": "remote_agent.harbor.server_url",
    "HARBOR_SERVER_TIMEOUT": "remote_agent.harbor.server_timeout_s",
    "HARBOR_DATASET_DIRS": "remote_agent.harbor.dataset_dirs",
    "REMOTE_AGENT_NAME": "remote_agent.harbor.agent_name",
    "REMOTE_AGENT_IMPORT_PATH": "remote_agent.harbor.agent_import_path",
    "REMOTE_AGENT_KWARGS": "remote_agent.harbor.agent_kwargs",
    "REMOTE_AGENT_MAX_RETRIES": "remote_agent.max_retries",
    "REMOTE_AGENT_RETRY_BASE_DELAY": "remote_agent.retry_base_delay",
    "REMOTE_AGENT_TASK_PATH_TEMPLATE": "remote_agent.harbor.task_path_template",
    "REMOTE_AGENT_ENVIRONMENT_OVERRIDES": "remote_agent.harbor.environment_overrides",
    "REMOTE_AGENT_ENVIRONMENT_KWARGS": "remote_agent.harbor.environment_kwargs",
    "REMOTE_AGENT_ENVIRONMENT_IMPORT_PATH": "remote_agent.harbor.environment_import_path",
    "REMOTE_AGENT_USE_LOCAL_TRIAL": "remote_agent.harbor.use_local_trial",
    "REMOTE_MODEL_NAME": "remote_agent.model_name",
}
"""Environment variable of verl's recipe → key. The variables keep their meaning, except that the
command line overrides them."""


class Sources:
    """The sources of a configuration. They are read once, when they are first asked for.

    Example: Sources([Path("run.yaml")], ["trainer.steps=3"], os.environ).values
    """

    def __init__(
        self,
        paths: Sequence[Path] = (),
        overrides: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Later files override earlier ones, the environment the files, and `overrides` all."""
        self.paths = paths
        self.overrides = overrides
        self.environment = environment or {}

    @property
    def values(self) -> dict[str, Any]:
        """The values of all sources. Raises ConfigError: a source cannot be read."""
        return self._merged[0]

    @property
    def origin(self) -> dict[str, str]:
        """For each key, the source that set it. Raises ConfigError as `values`."""
        return self._merged[1]

    @cached_property
    def _merged(self) -> tuple[dict[str, Any], dict[str, str]]:
        sources = [(f"{path}", _from_yaml(path)) for path in self.paths]
        sources.append(("the environment", _from_environment(self.environment)))
        sources.append(("the command line", _from_command_line(self.overrides)))
        values: dict[str, Any] = {}
        origin: dict[str, str] = {}
        for name, each in sources:
            _merge(values, each, "", name, origin)
        return values, origin


def shown(key: str, value: Any) -> str:
    """The value of a key as a message shows it, without secrets."""
    name = key.rpartition(".")[2]
    return HIDDEN if is_secret(name, value) else f"{without_secrets(value)!r:.100}"


def _from_yaml(path: Path) -> dict[str, Any]:
    try:
        data = read_yaml(path)
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
    try:
        return parse_yaml(text)
    except yaml.YAMLError as error:
        raise ConfigError(
            f"{where}={shown(where, text)}: not YAML ({error.__class__.__name__}); put it in quotes"
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


def changed_keys(
    before: Mapping[str, Any], now: Mapping[str, Any], prefix: str = ""
) -> Iterator[str]:
    """The keys whose values differ. Example: `optimizer.lr`"""
    for name in {**before, **now}:
        old, new = before.get(name), now.get(name)
        if isinstance(old, dict) and isinstance(new, dict):
            yield from changed_keys(old, new, f"{prefix}{name}.")
        elif old != new:
            yield f"{prefix}{name}"
