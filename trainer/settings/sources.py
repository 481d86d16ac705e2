"""Reads a configuration from its sources: command line > environment > YAML files > default.

Invariants:
- A value overrides the values of the sources after it in that order, and every error names the key,
  its value, its source and what to do. The error for another trainer's key names the key to use
  here, so that the messages are enough to translate a configuration of another system.
- A key's text is the docstring below its field, and its bounds are the bounds that are checked, so
  that the documentation of a key cannot differ from the code.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import re
import textwrap
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Union

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from agent_loop.outside_parts import OwnFunction
from proxy.config import SECTIONS, ProxyConfig
from proxy.errors import ConfigurationError
from proxy.extra_registry import section_type
from proxy.settings.hub import model_folder
from proxy.settings.late_section import LateSection
from proxy.settings.section import COMMON, Section
from trainer.algorithms.part import NamedPart, Parts
from trainer.config import TrainerConfig
from trainer.errors import ConfigError
from trainer.policy.repeatable import sum_in_one_order
from trainer.settings.values import Sources, shown


@dataclass(frozen=True, slots=True)
class Key:
    """Example: Key("algorithm.loss[gspo].clip_low", "Lower bound of …", field)"""

    path: str
    """The dotted path, with the part's name in brackets if a section is one of several parts."""
    text: str
    """The docstring below the field; empty if there is none."""
    field: FieldInfo
    sections: tuple[type[BaseModel], ...]
    """The sections that the key may hold: none for a value, several if one of them is chosen."""
    owner: type[BaseModel]
    """The class that documents the key, which several sections may inherit or hold."""

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]

    @property
    def part(self) -> str:
        """The path of what holds the key, with a part's name, and without the user's own name at
        its end; empty at the top."""
        return self.path.rpartition(".")[0].removesuffix(".NAME")

    @property
    def section(self) -> str:
        """The path of the section that holds the key, without a part's name at its end."""
        return re.sub(r"\[[^]]*\]$", "", self.part)

    @property
    def definition(self) -> tuple[type[BaseModel], str]:
        """What keys have in common whose sections inherit or hold the same section."""
        return self.owner, self.name

    @property
    def is_common(self) -> bool:
        """Whether the key is one of the few of its section that people set (`Common`)."""
        return COMMON in self.field.metadata

    @property
    def is_section(self) -> bool:
        """Whether the key only holds other keys: it is neither the name of one of several parts
        nor that of a function."""
        named = (NamedPart, OwnFunction)
        return bool(self.sections) and not any(issubclass(each, named) for each in self.sections)

    @property
    def part_names(self) -> list[str]:
        """The names of the parts of an algorithm of which the key holds one or several."""
        return [_name_of(each) for each in self.sections if issubclass(each, NamedPart)]

    @property
    def dotted(self) -> str:
        """The path as it is written on the command line. Example: algorithm.loss.clip_low"""
        return re.sub(r"\[[^]]*\]", "", self.path)


def keys_of(
    model: type[BaseModel], prefix: str = "", seen: frozenset[type[BaseModel]] = frozenset()
) -> Iterator[Key]:
    """Every key of the section and of its subsections, in the order of their definition."""
    documented = docstrings(model)
    for name, field in model.model_fields.items():
        if name == "name" and prefix.endswith("]"):
            continue  # the path contains the part's name
        path = f"{prefix}.{name}" if prefix else name
        is_late = model is ProxyConfig and name in SECTIONS
        annotation = section_type(name) if is_late else field.annotation
        nested = _parts(field.metadata) or tuple(_models(annotation))
        text, owner = documented[name]
        text = text or (_summary(nested[0]) if nested else "")
        yield Key(path, " ".join(text.split()), field, nested, owner)
        for each in nested:
            if each not in seen:
                variant = path if len(nested) == 1 else f"{path}[{_name_of(each)}]"
                if typing.get_origin(field.annotation) in (dict, Mapping):
                    variant = f"{path}.NAME"
                yield from keys_of(each, variant, seen | {each})


def docstrings(model: type[BaseModel]) -> dict[str, tuple[str, type[BaseModel]]]:
    """Name of a field of the class or its ancestors → the docstring below it, and the class that
    has it there. A class that only gives a field another default does not repeat its docstring."""
    texts: dict[str, tuple[str, type[BaseModel]]] = {}
    for cls in reversed(model.__mro__):
        if not issubclass(cls, BaseModel) or cls is BaseModel:
            continue
        body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
        assert isinstance(body, ast.ClassDef)
        field = ""
        for node in body.body:
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                field = node.target.id
                texts.setdefault(field, ("", cls))
            elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and field:
                texts[field] = (str(node.value.value), cls)
                field = ""
            else:
                field = ""
    return texts


def _summary(model: type[BaseModel]) -> str:
    """The first paragraph of the section's docstring, without its example."""
    own = model.__doc__ if model.__doc__ != BaseModel.__doc__ else None
    first = (own or "").strip().partition("\n\n")[0].partition("Example:")[0]
    return re.sub(r"^(The `\S+` section of a run|Section `\S+`)[.:]\s*", "", first)


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    """The pydantic models in an annotation, including those in unions and containers."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
        return
    origin = typing.get_origin(annotation)
    if origin is Annotated:
        kind, *metadata = typing.get_args(annotation)
        yield from _parts(metadata) or _models(kind)
    elif origin in (Union, types.UnionType, tuple, list, dict, Mapping):
        for part in typing.get_args(annotation):
            yield from _models(part)


def _parts(metadata: Iterable[Any]) -> tuple[type[BaseModel], ...]:
    """The classes of the registry in a field's annotation, or the section of the extra in it; empty
    if there is none of them."""
    for each in metadata:
        if isinstance(each, Parts):
            return each.classes
        if isinstance(each, LateSection):
            return tuple(_models(each.kind))
    return ()


def _name_of(model: type[BaseModel]) -> str:
    field = model.model_fields.get("name")
    return str(field.default) if field is not None else model.__name__


SUCCESSORS: Mapping[str, str] = {
    "actor.path": "model.path",
    "actor.optimizer.lr": "optimizer.lr",
    "ajet.model.path": "model.path",
    "gconfig.temperature": "rollout.temperature",
    "data.harbor_ability": "data.harbor.ability",
    "data.harbor_cache_dir": "data.harbor.cache_dir",
    "data.harbor_data_source": "data.harbor.data_source",
    "data.harbor_dataset_dirs": "remote_agent.harbor.dataset_dirs",
    "data.harbor_overwrite": "data.harbor.cache_dir, which can be deleted",
    "data.harbor_train_limit": "data.harbor.train_limit",
    "data.harbor_val_limit": "data.harbor.val_limit",
    "data.train_harbor_dir": "data.harbor.train_dir",
    "data.val_harbor_dir": "data.harbor.val_dir",
    "remote_agent.harbor_dataset_dirs": "remote_agent.harbor.dataset_dirs",
    "remote_agent.harbor_server_timeout": "remote_agent.harbor.server_timeout_s",
    "remote_agent.harbor_server_trials": "remote_agent.harbor.server_trials",
    "remote_agent.harbor_server_url": "remote_agent.harbor.server_url",
    "remote_agent.harbor.server_urls": "remote_agent.harbor.server_url, a list",
    "remote_agent.harbor_server_urls": "remote_agent.harbor.server_url, a list",
    **{
        f"remote_agent.{name}": f"remote_agent.harbor.{name}"
        for name in (
            *("agent_name", "agent_import_path", "agent_kwargs", "agent_env", "environment_type"),
            *("environment_import_path", "environment_kwargs", "environment_overrides"),
            *("verifier_kwargs", "task_path_template", "upload_tasks", "use_local_trial"),
        )
    },
    **{
        f"remote_agent.{launcher}.{name}": f"remote_agent.process.{name}"
        for launcher in (
            *("command", "python", "ray", "openenv", "verifiers.process", "http", "kubernetes"),
        )
        for name in ("pass_env", "grace_s", "log_bytes", "limits")
    },
    "remote_agent.verifiers.process": "remote_agent.verifiers.program",
    "algorithm.distillation.teacher_url": "algorithm.distillation.teacher",
    "cluster.ready_timeout_s": "cluster.room_timeout_s",
    "remote_agent.harbor.reward_key": "remote_agent.harbor.key",
    "remote_agent.reward_key": "remote_agent.harbor.key",
    "remote_agent.judge.checkpoint": "remote_agent.judge.model",
    "remote_agent.judge.policy": "remote_agent.judge.model, with the value `policy`",
    "remote_agent.kubernetes.jobs": "remote_agent.kubernetes.agents",
    "remote_agent.kubernetes.start_timeout_s": "remote_agent.kubernetes.room_timeout_s",
    "remote_agent.ray.start_timeout_s": "remote_agent.ray.room_timeout_s",
    "data.harbor.overwrite": "data.harbor.cache_dir, which can be deleted",
    "remote_agent.kubernetes.node_selector": "remote_agent.kubernetes.pod, as nodeSelector",
    "remote_agent.llm_proxy_ip": "proxy_server.llm_proxy_ip",
    "remote_agent.placement": "remote_agent.command, remote_agent.kubernetes, remote_agent.ray or "
    "remote_agent.harbor.server_url",
    "remote_agent.proxy_server_url": "proxy_server.url",
    "rollout.n": "rollout.group_size",
    "rollout.prefix": "rollout.producer, with the target examples.branching.producers:prefixes",
    "rollout.tree": "rollout.producer, with the target examples.branching.producers:trees",
    "sft.id_prefix": "sft.where",
    "sft.max_reward": "sft.where",
    "train_dataset.batch_size": "rollout.groups_per_step",
    "train_dataset.path": "data.train_files",
    "trainer.dir": "trainer.run_dir",
    "valid_dataset.path": "data.val_files",
}
"""A whole key of before, or elsewhere (with those of `ELSEWHERE`) → the key here."""

SUCCESSORS_BY_LAST_NAME: Mapping[str, str] = {
    "adv_estimator": "algorithm.advantage.name",
    "clip_ratio_high": "algorithm.loss.clip_high",
    "clip_ratio_low": "algorithm.loss.clip_low",
    "documents": "function, with the target examples.documents.documents:parts",
    "gpu_memory_utilization": "engine.gpu_memory_share",
    "grpo_n": "rollout.group_size",
    "interchange_server_port": "the port of --swarm-server HOST:PORT",
    "kl_loss_coef": "algorithm.kl.coefficient",
    "loss_agg_mode": "algorithm.aggregation",
    "max_concurrent_rollouts": "rollout.concurrency",
    "max_env_worker": "rollout.concurrency",
    "max_head_offpolicyness": "rollout.max_staleness",
    "max_model_len": "engine.max_context_tokens",
    "max_new_tokens": "rollout.max_tokens",
    "max_response_length": "rollout.max_tokens",
    "max_token_staleness": "rollout.max_staleness and rollout.stale",
    "n_gpus_per_node": "trainer.ranks and engine.replicas",
    "n_samples": "rollout.group_size",
    "num_repeat": "rollout.group_size",
    "over_sample_threshold": "rollout.over_sample, the share of additional groups",
    "ppo_epochs": "algorithm.epochs",
    "ppo_mini_batch_size": "algorithm.mini_batches, the number of mini-batches of a step",
    "save_freq": "trainer.save_every",
    "summaries": "remote_agent.credit.function, as in benchmarks/compaction/masked.py",
    "swarm_mode_sample_collection_max_cached_episodes": "swarm.max_collected",
    "swarm_mode_sample_collection_method": "swarm.stop_rule",
    "top_k": "rollout.top_k",
    "top_p": "rollout.top_p, with rollout.top_k",
    "tail_batch_trigger_size": "rollout.tail_groups",
    "test_freq": "eval.every",
    "tool_format": "proxy_server.renderer",
    "total_epochs": "trainer.steps",
    "total_train_epochs": "trainer.steps",
    "total_training_steps": "trainer.steps",
    "train_batch_size": "rollout.groups_per_step",
}
"""The last part of another trainer's key, whatever its section there → the key here."""


_AGENT = re.compile(r"agents\.[^.]+\.")


def successor(key: str) -> str | None:
    """The name here of another trainer's key, or of one that was here before, or of a section
    that holds it; None if it is not known. Each of several `agents` has the keys of
    `remote_agent`."""
    if one := _AGENT.match(key):
        here = successor(f"remote_agent.{key[one.end() :]}")
        return here and here.replace("remote_agent.", one[0])
    parts = key.split(".")
    sections = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
    from trainer.settings.elsewhere import ELSEWHERE  # a run with right keys needs none of them

    known = {**ELSEWHERE, **SUCCESSORS}
    whole = next((known[each] for each in sections if each in known), None)
    return whole or SUCCESSORS_BY_LAST_NAME.get(parts[-1])


_NAMED = re.compile(r"^(agents|(?:agents\.[^.]+\.)?data\.(?:train|val)_sources)\.[^.]+")
"""A section that has a name of the user's own."""


def load(
    paths: Sequence[Path] = (),
    overrides: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> TrainerConfig:
    """The configuration from the YAML files, the environment and the command line. Later files
    override earlier ones. Raises ConfigError as `checked`."""
    return checked(Sources(paths, overrides, environment))


def checked(sources: Sources) -> TrainerConfig:
    """The configuration from its sources. A model of the hub is downloaded; its path is that of
    its folder.

    Raises:
        ConfigError: names all wrong keys, or says why the model cannot be downloaded.
    """
    values, origin = sources.values, sources.origin
    if isinstance(trainer := values.get("trainer"), Mapping) and trainer.get("deterministic"):
        sum_in_one_order()
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


def dump_changed(config: Section) -> str:
    """The keys whose values are not their defaults, as YAML, from which `load` reads an equal
    configuration."""
    return yaml.safe_dump(_changed(config), sort_keys=False, allow_unicode=True)


def _changed(section: BaseModel) -> dict[str, Any]:
    values, found = section.model_dump(mode="json"), dict[str, Any]()
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if field.default_factory_takes_validated_data:
            default = value if name not in section.model_fields_set else None
        else:
            default = field.get_default(call_default_factory=True)
        is_name = name == "name" and isinstance(section, NamedPart)
        if is_name or field.is_required() or value != default:
            alone = isinstance(value, BaseModel) and _is_plain(type(value), default)
            found[name] = _changed(value) if alone else values[name]
    return found | {name: values[name] for name in section.model_extra or ()}


def _is_plain(section: type[BaseModel], default: Any) -> bool:
    """Whether what is left out of the section has the default of its class: a field may have
    another default, which the class does not know."""
    if type(default) is not section:
        return True
    return all(not field.is_required() for field in section.model_fields.values()) and (
        default == section()
    )
