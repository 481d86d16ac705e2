"""Names of settings in other systems are those of their configurations, and lead to keys here.

Here are the keys of every extra, too."""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.needs import skip_or_fail
from trainer.config import TrainerConfig
from trainer.errors import ConfigError
from trainer.settings.elsewhere import (
    ELSEWHERE,
    OPENRLHF,
    PRIME_RL,
    SKYRL,
    TRL,
    VERIFIERS,
    VERL,
)
from trainer.settings.sources import keys_of, load

ROOT = Path(__file__).parents[3]
EXPORTS, OWN = ROOT / ".cache/export-packages", ROOT / ".cache/verifiers"
TRL_CLASSES = ("GRPOConfig", "ModelConfig", "ScriptArguments")
PRIME_RL_0_8_0 = """
class RLConfig:
    trainer: TrainerConfig
    orchestrator: OrchestratorConfig
    output_dir: Path
    ckpt: CheckpointConfig
    monitors: MonitorsConfig
    model: SharedModelConfig
    max_steps: int
    seq_len: int
    deployment: SingleNodeDeploymentConfig
class SingleNodeDeploymentConfig:
    num_train_gpus: int
    num_infer_gpus: int
class SharedModelConfig:
    name: str
class CheckpointConfig:
    interval: int
    keep_last: int
class MonitorsConfig:
    wandb: WandbConfig
class WandbConfig:
    project: str
class TrainerConfig:
    model: ModelConfig
    optim: BaseOptimizerConfig
    scheduler: LinearSchedulerConfig
class ModelConfig:
    ep: int
    cp: int
    lora: LoRAConfig
class LoRAConfig:
    rank: int
    alpha: float
class BaseOptimizerConfig:
    lr: float
    weight_decay: float
    max_norm: float
class LinearSchedulerConfig:
    type: str
    warmup_steps: int
class OrchestratorConfig:
    algo: GRPOAlgoConfig
    train: TrainConfig
    eval: EvalConfig
    batch_size: int
    concurrency: ConcurrencyConfig
    group_size: int
    max_off_policy_steps: int
class GRPOAlgoConfig:
    type: str
class TrainConfig:
    source: list
    sampling: TrainSamplingConfig
    filter_zero_advantages: bool
class TrainSamplingConfig:
    temperature: float
    max_completion_tokens: int
class EvalConfig:
    source: list
    num_examples: int
    group_size: int
    interval: int
    skip_first_step: bool
class ConcurrencyConfig:
    max_inflight: int
"""
"""What we name of its classes, as its source of 559b447 (2026-08-21) has them: it is not on the
package index."""


class Declared:
    """The configuration classes of Python source. Nothing is imported: some need a GPU."""

    def __init__(self, sources: Iterable[str]) -> None:
        nodes = [node for text in sources for node in ast.walk(ast.parse(text))]
        self._classes = {node.name: node for node in nodes if isinstance(node, ast.ClassDef)}

    def has(self, owner: str, key: str) -> bool:
        """Whether the dotted key is one of the class `owner`."""
        first, _, rest = key.partition(".")
        kind = dict(self._fields(owner)).get(first)
        if kind is None or not rest:
            return kind is not None
        held = [name for name in re.findall(r"\w+", kind) if name in self._classes]
        return any(self.has(name, rest) for name in held)

    def _fields(self, owner: str) -> Iterator[tuple[str, str]]:
        """Name → its annotation and its default, ancestors first."""
        node = self._classes.get(owner)
        for base in node.bases if node else ():
            yield from self._fields(ast.unparse(base))
        for line in node.body if node else ():
            if isinstance(line, ast.AnnAssign):
                yield ast.unparse(line.target), ast.unparse(line).partition(":")[2]


def python_of(folder: Path, package: str, pattern: str) -> list[str]:
    """The source of the installed package's files."""
    found = sorted(folder.glob(f"lib/python3*/site-packages/{package}/{pattern}"))
    if not found:
        skip_or_fail(f"{package} is not installed: python -m benchmarks.install {folder.name}")
    return [file.read_text("utf-8") for file in found]


def missing(names: Mapping[str, str], sources: list[str], owner: str) -> list[str]:
    declared = Declared(sources)
    return [name for name in names if not declared.has(owner, name)]


def test_names_of_trl_are_fields_of_its_classes() -> None:
    if importlib.util.find_spec("trl") is None:
        skip_or_fail("TRL is not installed: python -m benchmarks.install reference")
    import trl

    classes: list[Any] = [getattr(trl, name) for name in TRL_CLASSES]
    fields = {field.name for each in classes for field in dataclasses.fields(each)}
    assert set(TRL) <= fields, set(TRL) - fields


def test_names_of_verl_are_in_its_configuration() -> None:
    found = importlib.util.find_spec("verl")
    if found is None or found.origin is None:
        skip_or_fail("verl is not installed: python -m benchmarks.install reference")
    file = Path(found.origin).parent / "trainer/config/_generated_ppo_trainer.yaml"
    whole: Any = yaml.safe_load(file.read_text("utf-8"))
    for name in VERL:
        section = whole
        for part in name.split("."):
            assert part in section, name
            section = section[part]


@pytest.mark.long
def test_names_of_skyrl_are_fields_of_its_classes() -> None:
    sources = python_of(EXPORTS, "skyrl", "train/config/config.py")
    assert missing(SKYRL, sources, "SkyRLTrainConfig") == []


@pytest.mark.long
def test_names_of_openrlhf_are_flags_of_its_command() -> None:
    (text,) = python_of(EXPORTS, "openrlhf", "cli/train_ppo_ray.py")
    flags = set(re.findall(r'"--([\w.{}]+)"', text))
    own = {name.replace("{prefix}", "actor") for name in flags}
    assert set(OPENRLHF) <= own, set(OPENRLHF) - own


@pytest.mark.long
def test_names_of_verifiers_are_fields_of_its_classes() -> None:
    sources = python_of(OWN, "verifiers", "v1/**/*.py")
    assert missing(VERIFIERS, sources, "EvalConfig") == []


def test_names_of_prime_rl_are_fields_of_its_classes() -> None:
    assert missing(PRIME_RL, [PRIME_RL_0_8_0], "RLConfig") == []
    assert missing({"orchestrator.group_sizes": ""}, [PRIME_RL_0_8_0], "RLConfig")


def test_names_that_systems_share_mean_the_same() -> None:
    systems = (VERL, TRL, SKYRL, OPENRLHF, PRIME_RL, VERIFIERS)
    for names in systems:
        assert {name: ELSEWHERE[name] for name in names} == names


def test_none_of_the_names_is_a_key_here() -> None:
    assert not set(ELSEWHERE) & {key.dotted for key in keys_of(TrainerConfig)}


@pytest.mark.parametrize(
    ("given", "here"),
    [
        ("learning_rate=1e-6", "optimizer.lr"),
        ("num_generations=8", "rollout.group_size"),
        ("beta=0.04", "algorithm.kl.coefficient"),
        ("max_completion_length=512", "rollout.max_tokens"),
        ("trainer.policy.optimizer_config.lr=1e-6", "optimizer.lr"),
        ("generator.n_samples_per_prompt=5", "rollout.group_size"),
        ("algo.kl.init_coef=0.01", "algorithm.kl.coefficient"),
        ("orchestrator.max_off_policy_steps=8", "rollout.max_staleness"),
        ("num_rollouts=4", "eval.repeats"),
    ],
)
def test_a_key_of_another_system_is_told_the_key_here(
    given: str, here: str, tmp_path: Path
) -> None:
    file = tmp_path / "run.yaml"
    agent = {"command": {"argv": ["true"]}}
    data = {"train_files": ["tasks.jsonl"]}
    file.write_text(yaml.safe_dump({"model": {"path": "m"}, "data": data, "remote_agent": agent}))
    with pytest.raises(ConfigError, match=rf"there is no such key; here it is {re.escape(here)}$"):
        load([file], [given])
