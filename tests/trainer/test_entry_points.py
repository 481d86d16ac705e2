"""Parts that installed packages register as entry points are named by their short names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agent_loop.launchers.registry import OutsideLauncher
from tests.agent_loop.installed_package import install
from trainer.errors import ConfigError
from trainer.settings.sources import load

MODULE = """
from agent_loop.launchers.protocol import LauncherConfig

class Slurm(LauncherConfig):
    partition: str = "cpu"

from trainer.algorithms.advantages import group_mean
def half(returns, factor=0.5): return returns.centred(group_mean) * factor
def plain(logprobs, prox, advantages, sequence): return -advantages * (logprobs - prox).exp()
def run(call): return 1.0
def grade(call): return 1.0
def last(turns, reward): return {}
def numbers(seed): return [{"task_id": "a", "prompt": "Add up."}]
def keep(group): return True
def make(loop, tasks, config, seed): return None
def count(rollouts): return {"mine/count": float(len(rollouts))}
"""
POINTS = {
    "advantage": ("half_centred", "half"),
    "loss": ("plain_ratio", "plain"),
    "agent": ("cashier", "run"),
    "reward": ("always", "grade"),
    "credit": ("last_turn", "last"),
    "task_source": ("numbers", "numbers"),
    "filter": ("all", "keep"),
    "producer": ("none", "make"),
    "metric": ("count", "count"),
    "launcher": ("slurm", "Slurm"),
}
CONFIG = """
model: {path: examples/quickstart/model}
data: {train_sources: {numbers: {function: numbers}}}
remote_agent:
  python: {target: cashier}
  grader: {target: always}
  credit: {function: last_turn}
rollout: {filter: all, producer: none}
algorithm:
  advantage: {name: half_centred, factor: 0.25}
  loss: plain_ratio
logging: {metrics: [count]}
"""


@pytest.fixture
def shop_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A configuration that names parts of the installed package `shop-parts`."""
    groups = {f"agentic_rl.{kind}": {name: f"shop_parts:{f}"} for kind, (name, f) in POINTS.items()}
    install(tmp_path, "shop-parts", {"shop_parts": MODULE}, groups)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "run.yaml").write_text(CONFIG)
    return tmp_path / "run.yaml"


def test_every_kind_of_part_is_named_by_its_entry_point(shop_parts: Path) -> None:
    config = load([shop_parts])
    functions: list[Any] = [
        config.data.train_sources["numbers"].function,
        config.remote_agent.python,
        config.remote_agent.grader,
        config.remote_agent.credit.function,
        config.rollout.filter,
        config.rollout.producer,
        *config.logging.metrics,
    ]
    named = [function.target for function in functions]
    named += [config.algorithm.advantage.name, config.algorithm.loss.name]
    assert sorted(named) == sorted(
        f"shop_parts:{function}" for kind, (_, function) in POINTS.items() if kind != "launcher"
    )


def test_launcher_of_an_entry_point_gets_its_settings(shop_parts: Path) -> None:
    values = {"target": "slurm", "settings": {"partition": "gpu"}}
    launcher = OutsideLauncher.model_validate(values)
    assert launcher.target == "shop_parts:Slurm"


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("rollout.filter", "filter: 'best' is unknown; use one of all, or the import path"),
        ("algorithm.advantage", "half_centred"),
        ("remote_agent.python.target", "use one of cashier, or the import path"),
    ],
)
def test_unknown_name_is_refused_with_the_names_that_packages_register(
    shop_parts: Path, key: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load([shop_parts], [f"{key}=best"])


def test_name_without_any_registered_part_is_refused_with_what_to_give() -> None:
    with pytest.raises(ValueError, match="'slurm' is unknown; use the import path"):
        OutsideLauncher.model_validate({"target": "slurm"})


def test_name_that_two_packages_register_is_refused_with_both(
    shop_parts: Path, tmp_path: Path
) -> None:
    other = {"agentic_rl.filter": {"all": "other_parts:keep"}}
    install(tmp_path, "other-parts", {"other_parts": "def keep(group): return True\n"}, other)
    with pytest.raises(ConfigError, match=r"other-parts \(other_parts:keep\)") as raised:
        load([shop_parts])
    assert "shop-parts (shop_parts:keep)" in str(raised.value)
