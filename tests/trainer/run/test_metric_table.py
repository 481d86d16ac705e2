"""Every metric that a run writes is explained, and under its names elsewhere.

The table has the metrics of the core and of every extra."""

from __future__ import annotations

import ast
import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

import trainer
from agent_loop.producers.groups import Verdict
from proxy.commands.metric_reference import reference
from proxy.run_files.metric_table import Metric, metric_groups, metric_lines, metric_of
from tests.needs import skip_or_fail
from trainer.cli import main

ROOT = Path(__file__).parents[3]
METRICS = [metric for metrics in metric_groups().values() for metric in metrics]
GROUPS = {metric.name.partition("/")[0] for metric in METRICS if "/" in metric.name}
NOT_METRICS = {"reward/reward.json", "reward/reward.txt"}
TERMS = (
    *("policy_loss", "loss", "policy_kl", "clip_fraction", "correction/weight", "entropy"),
    *("correction/rejected", "logp_abs_diff", "kl_loss", "distillation_loss", "entropy_bonus"),
    "distillation_left_out",
    *("router_aux_loss", "trained_tokens", "update_steps", "grad_norm", "lr"),
)
"""Metrics of an optimizer step, which the code writes without `actor/`."""


def written(folder: Path) -> Iterator[str]:
    """The names of metrics in the code, with brackets for what is put into them."""
    for file in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                name = node.value
            elif isinstance(node, ast.JoinedStr):
                name = "".join(
                    str(part.value) if isinstance(part, ast.Constant) else "some"
                    for part in node.values
                )
            else:
                continue
            first, slash, _ = name.partition("/")
            if name[-1:].isalnum() and slash and first in GROUPS and name not in NOT_METRICS:
                yield name


def test_every_metric_in_the_code_is_explained() -> None:
    found = set(written(Path(trainer.__file__).parent)) | {f"actor/{name}" for name in TERMS}
    found |= {f"groups/{verdict}" for verdict in Verdict} | {"policies/big/actor/entropy"}
    assert len(found) > 80
    # A name that the code puts together stands for all of its kind.
    together = {"actor/some", "critic/some", "sft/some", "eval/some", "time/some_s", "rollout/some"}
    together |= {"sync/some", "eval/agent/some/success", "eval/agent/some/reward"}
    assert not {name for name in found - together if metric_of(name) is None}


def test_every_explained_metric_is_in_the_code() -> None:
    code = "\n".join(
        file.read_text("utf-8")
        for package in ("trainer", "agent_loop")
        for file in (ROOT / package).rglob("*.py")
    )
    last = {metric.name: metric.name.rpartition("/")[2].partition("[")[0] for metric in METRICS}
    assert not {name for name, part in last.items() if part.removesuffix("_s") not in code}


@pytest.mark.parametrize(("package", "of"), [("verl", "verl"), ("trl", "trl")])
def test_names_elsewhere_are_in_the_package_itself(package: str, of: str) -> None:
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None:
        skip_or_fail(f"{package} is not installed: python -m benchmarks.install reference")
    code = "\n".join(
        file.read_text("utf-8", "replace") for file in Path(found.origin).parent.rglob("*.py")
    )
    names = {getattr(metric, of) for metric in METRICS} - {""}
    assert len(names) > 10
    # timers are `timing_s/` and the name that a block has
    missing = {
        name
        for name in names
        if f"{name}" not in code and f'"{name.rpartition("/")[2]}"' not in code
    }
    assert not missing


def test_page_is_up_to_date() -> None:
    command = "python -m proxy.commands.metric_reference > docs/metrics.md"
    assert (ROOT / "docs/metrics.md").read_text() == reference(), f"generate it again: {command}"


def test_the_page_has_the_same_texts() -> None:
    file = ROOT / "proxy/extras/view/client/metrics.js"
    command = (
        "python -m proxy.commands.metric_reference --page > proxy/extras/view/client/metrics.js"
    )
    shown = json.loads(file.read_text().partition("METRICS = ")[2].strip().rstrip(";"))
    assert shown == texts(), f"generate it again: {command}"


def texts() -> dict[str, list[str]]:
    return {metric.name: list(metric_lines(metric)) for metric in METRICS}


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("actor/clip_fraction", "the same elsewhere: actor/pg_clipfrac in verl"),
        ("grad_norm", "sft/grad_norm (L2 norm)"),
        (
            "staleness/tokens_at_3",
            "staleness/tokens_at_[age] (tokens): Trained tokens of this age.",
        ),
        ("policies/small/actor/entropy", "actor/entropy (nats)"),
        ("rollout.group_size", "`rollout.group_size` (default 8"),
        ("proxy_server.profile", "`proxy_server.profile`"),
        ("too-hard", "too hard (verdict): most groups have nothing to learn"),
        ("Already_Solved", "already solved (verdict): "),
    ],
)
def test_settings_metrics_and_verdicts_are_explained(
    name: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", name]) == 0
    assert said in " ".join(capsys.readouterr().out.split())


def test_what_is_not_known_is_refused_with_what_is_like_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["explain", "rollout/sucess"]) == 2
    assert "did you mean rollout/success" in capsys.readouterr().err


def test_names_in_brackets_stand_for_one_part() -> None:
    assert metric_of("agent/a/b/reward") is None
    assert metric_of("mine/count") is None
    found = metric_of("eval/pass_at_4")
    assert isinstance(found, Metric)
    assert found.name == "eval/pass_at_[k]"
