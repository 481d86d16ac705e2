"""Every metric that an alert rule, the dashboard, an overlay or a page names is exported today.

So are the labels and label values that it names. No Prometheus is needed: the parts are asked.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from agent_loop.extras.swarm.metrics import exposition
from agent_loop.extras.swarm.wire import EngineState, Status
from proxy.run_files.metric_table import metric_of
from proxy.run_files.verdict import Word
from proxy.testing.scripted_engine import Fault
from tests.docs_words import users_pages
from tests.harbor_sdk.scripted_server import BEARER, ScriptedTrials, serving
from tests.proxy.conftest import (  # noqa: F401
    ADMIN_KEY,
    RunningProxy,
    StartProxy,
    checkpoint,
    rendering,
    start_proxy,
)
from tests.trainer.view.recorded_run import begin, training

K8S = Path(__file__).parents[2] / "k8s"
NAME = r"\bagentic_(?:proxy|swarm|harbor)_\w+"
_SELECTOR = re.compile(rf"({NAME})(?:\{{([^}}]*)\}})?")
_MATCHER = re.compile(r'(\w+)\s*(?:=~|!=|=)\s*"([^"]*)"')
_GROUPED = re.compile(r"\b(?:by|without) \(([^)]*)\)")
_SHOWN = re.compile(r"\{\{\s*(?:\$labels\.)?(\w+)\s*\}\}")
ENGINE = "vllm:num_requests_waiting 3\nvllm:kv_cache_usage_perc 0.5\n"
HELLO = {"messages": [{"role": "user", "content": "Hi."}]}


@dataclass(frozen=True, slots=True)
class Named:
    """Example: Named("EngineDown", "agentic_proxy_engine_up", {"engine"}, {})"""

    where: str
    metric: str
    labels: frozenset[str]
    values: tuple[tuple[str, str], ...]
    """Each label and one of its values, of those that the expression names."""


def named(where: str, expression: str, text: str) -> Iterator[Named]:
    """`text`: what is shown with it, where `{{label}}` stands for a label."""
    grouped = {each.strip() for found in _GROUPED.findall(expression) for each in found.split(",")}
    shown = set(_SHOWN.findall(text))
    for metric, matchers in _SELECTOR.findall(expression):
        given = _MATCHER.findall(matchers)
        labels = grouped | shown | {label for label, _ in given}
        values = tuple((label, one) for label, value in given for one in value.split("|"))
        yield Named(where, metric, frozenset(labels), values)


def of_the_dashboard() -> list[Named]:
    panels = json.loads((K8S / "dashboard.json").read_text())["panels"]
    return [
        each
        for panel in panels
        for target in panel.get("targets", ())
        for each in named(panel["title"], target["expr"], target.get("legendFormat", ""))
    ]


def of_the_rules() -> list[Named]:
    groups = yaml.safe_load((K8S / "alerts.yaml").read_text())["groups"]
    return [
        each
        for group in groups
        for rule in group["rules"]
        for each in named(rule["alert"], rule["expr"], " ".join(rule["annotations"].values()))
    ]


def of_files() -> dict[str, set[str]]:
    """The names in the overlays, the chart and the pages, by file."""
    files = [*K8S.rglob("*.yaml"), *users_pages()]
    return {
        str(file): names for file in files if (names := set(re.findall(NAME, file.read_text())))
    }


@dataclass(slots=True)
class Exported:
    """What the parts export: families, and the labels of each sample."""

    families: set[str]
    samples: dict[str, list[dict[str, str]]]

    def add(self, text: str) -> None:
        for family in text_string_to_metric_families(text):
            self.families.add(family.name)
            for sample in family.samples:
                self.samples.setdefault(sample.name, []).append(dict(sample.labels))

    def lacks(self, wanted: Named) -> str:
        """What is missing of it; empty: nothing."""
        labelled = self.samples.get(wanted.metric, [])
        if not labelled:
            return "it is not exported"
        if not any(wanted.labels <= labels.keys() for labels in labelled):
            return f"it has the labels {sorted(labelled[0])}, not {sorted(wanted.labels)}"
        known = {"verdict": {word.value for word in Word}}
        for label, value in wanted.values:
            there = {labels[label] for labels in labelled} | known.get(label, set())
            if label == "metric" and metric_of(value) is not None:
                continue  # docs/metrics.md, which has what the trainer's code writes
            if value not in there and not any(re.fullmatch(value, each) for each in there):
                return f"{label} is never {value!r}"
        return ""


async def metrics_of(url: str, headers: dict[str, str]) -> str:
    async with aiohttp.ClientSession() as http, http.get(url, headers=headers) as response:
        assert response.status == 200
        return await response.text()


@pytest.fixture
async def exported(
    start_proxy: StartProxy,  # noqa: F811
    checkpoint: Path,  # noqa: F811
    tmp_path: Path,
) -> Exported:
    """Of a proxy with a run, one whose engine fails, a swarm and a harbor-server."""
    found = Exported(set(), {})
    admin = {"Authorization": f"Bearer {ADMIN_KEY}"}
    watching, run = await training(start_proxy, begin(tmp_path / "run", checkpoint))
    await run.evaluate("before")
    await run.step()
    run.log.close()
    watching.engine.cache_tokens, watching.engine.load = 1_000, ENGINE
    failing: Any = {"limits": {"engine_patience_s": 0}, "scheduling": {}}
    proxy: RunningProxy = await start_proxy(store=f"sqlite:///{tmp_path}/other.db", **failing)
    session = await proxy.session()
    proxy.engine.faults = [Fault("error")]
    assert (await proxy.post(session, "chat/completions", HELLO))[0] == 503
    async with asyncio.timeout(30):  # an engine's load comes with the next look at its health
        while "agentic_proxy_engine_cache_used{" not in (
            text := await metrics_of(f"{watching.url}/metrics", admin)
        ):
            watching.engine.checked.clear()
            await watching.engine.checked.wait()
    found.add(text)
    found.add(await metrics_of(f"{proxy.url}/metrics", admin))
    found.add(exposition(Status(state=EngineState.ROLLING, counts={"ended": 1}), 0).decode())
    async with serving(tmp_path, ScriptedTrials()) as harbor:
        found.add(await metrics_of(f"{harbor}metrics", BEARER))
    return found


async def test_metrics_of_rules_panels_and_pages_are_exported(exported: Exported) -> None:
    wanted = of_the_dashboard() + of_the_rules()
    assert len(wanted) > 30
    assert not {(each.where, each.metric): why for each in wanted if (why := exported.lacks(each))}
    known = exported.families | exported.samples.keys()
    files = of_files()
    assert {Path(file).name for file in files} >= {"scaling.yaml", "engines.md", "rewind.md"}
    assert not {
        (file, name)
        for file, names in files.items()
        for name in names
        if name not in known and name.removesuffix("_total") not in known
    }


def test_labels_and_values_of_an_expression_are_found() -> None:
    expression = 'sum by (le, part) (rate(agentic_proxy_x_total{status=~"5..|409"}[5m])) > 0'
    (found,) = named("panel", expression, "{{part}} of {{ $labels.run }}: {{ $value }}")
    assert found.metric == "agentic_proxy_x_total"
    assert found.labels == {"le", "part", "status", "run"}
    assert found.values == (("status", "5.."), ("status", "409"))
