"""The alert rules and the dashboard, on metrics that there are; a real Prometheus loads both."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from aiohttp import web

from proxy.machine.port import free_port
from proxy.run_files.verdict import Word
from tests.needs import needs
from tests.pages import all_blocks
from tests.proxy.conftest import (  # noqa: F401
    ADMIN_KEY,
    RunningProxy,
    checkpoint,
    proxy,
    rendering,
    start_proxy,
)

ROOT = Path(__file__).parents[2]
K8S = ROOT / "k8s"
ALERTS = K8S / "alerts.yaml"
GOOD = {Word.LEARNING, Word.TOO_EARLY}
MISSING = (
    None
    if shutil.which("prometheus")
    else "no prometheus: apt-get install --no-install-recommends prometheus"
)
EXAMPLES = """\
agentic_proxy_run_verdict{run="r",verdict="failing"} 1
agentic_proxy_run_verdict{run="s",verdict="too hard"} 1
agentic_proxy_engine_up{engine="e"} 0
agentic_proxy_waiting_calls 3
agentic_proxy_engine_queued_calls{engine="e"} 3
agentic_proxy_engine_cache_used{engine="e"} 0.5
agentic_proxy_run_metric{metric="step",run="r"} 4
agentic_swarm_episodes{state="ended"} 2
agentic_swarm_waiting_claims 1
agentic_harbor_runs{status="completed"} 7
"""
"""What the test's proxy does not export: other parts', and states that it is not in."""
QUIET = ("engine_failures", "refused_calls")
"""Metrics that have samples after a failure only."""


def expressions() -> list[str]:
    panels = json.loads((K8S / "dashboard.json").read_text())["panels"]
    return [target["expr"] for panel in panels for target in panel.get("targets", ())]


def test_every_verdict_that_needs_somebody_has_one_alert() -> None:
    group, _ = yaml.safe_load(ALERTS.read_text())["groups"]
    named: list[str] = []
    for rule in group["rules"]:
        found = re.fullmatch(r'agentic_proxy_run_verdict\{verdict=~"(.*)"\} == 1', rule["expr"])
        assert found is not None
        named += found[1].split("|")
        assert "{{ $labels.run }}" in rule["annotations"]["summary"]
    assert sorted(named) == sorted(word.value for word in Word if word not in GOOD)


@asynccontextmanager
async def prometheus(folder: Path, targets: list[dict[str, Any]]) -> AsyncIterator[str]:
    """A server that scrapes each second, with the alert rules, which fire at once."""
    rules = re.sub(r"for: \d+m", "for: 0s", ALERTS.read_text())
    (folder / "alerts.yaml").write_text(rules)
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": ["alerts.yaml"],
        "scrape_configs": targets,
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = await asyncio.create_subprocess_exec(
        "prometheus",
        f"--config.file={folder}/prometheus.yml",
        f"--storage.tsdb.path={folder}/data",
        f"--web.listen-address=127.0.0.1:{port}",
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        yield f"http://127.0.0.1:{port}/api/v1"
    finally:
        process.terminate()
        await process.wait()


def shipped_job(addresses: list[str], folder: Path) -> dict[str, Any]:
    """The job of docker/prometheus.yml, for these proxies."""
    config = yaml.safe_load((ROOT / "docker/prometheus.yml").read_text())
    assert config["rule_files"] == [ALERTS.name]
    job: dict[str, Any]
    (job,) = config["scrape_configs"]
    (folder / "metrics-key").write_text(f"{ADMIN_KEY}\n")
    job["authorization"]["credentials_file"] = str(folder / "metrics-key")
    job["static_configs"][0]["targets"] = addresses
    job["scrape_interval"] = "1s"
    return job


def test_a_dead_proxy_is_found_by_the_name_of_its_job() -> None:
    """The Prometheus operator names the job after the service."""
    rules = [
        rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]
    ]
    (down,) = [rule["expr"] for rule in rules if rule["alert"] == "ProxyDown"]
    service = yaml.safe_load((K8S / "base/service.yaml").read_text())
    (job,) = yaml.safe_load((ROOT / "docker/prometheus.yml").read_text())["scrape_configs"]
    names = {service["metadata"]["name"], job["job_name"]}
    assert {f'up{{job="{name}"}} == 0' for name in names} == {down}


def test_proxies_of_the_page_admit_prometheus() -> None:
    """A proxy refuses requests for host names that it does not know."""
    (block,) = [
        block
        for block in all_blocks("yaml")
        if block.page == "docs/deployment.md" and "public_url" in block.text
    ]
    admitted = set(yaml.safe_load(block.text)["allowed_hosts"])
    (job,) = yaml.safe_load((ROOT / "docker/prometheus.yml").read_text())["scrape_configs"]
    asked = {each.partition(":")[0] for each in job["static_configs"][0]["targets"]}
    assert asked == admitted


async def _has(http: aiohttp.ClientSession, url: str, expression: str) -> bool:
    async with http.get(f"{url}/query", params={"query": expression}) as response:
        answer = await response.json()
    assert answer["status"] == "success", answer
    return bool(answer["data"]["result"])


@needs(MISSING)
@pytest.mark.programs
async def test_real_prometheus_loads_the_rules_and_answers_every_panel(
    proxy: RunningProxy,  # noqa: F811
    tmp_path: Path,
) -> None:
    session = await proxy.session()
    for _ in range(3):
        body = {"messages": [{"role": "user", "content": "Hi."}]}
        assert (await proxy.post(session, "chat/completions", body))[0] == 200

    async def examples(_: web.Request) -> web.Response:
        return web.Response(text=EXAMPLES)

    app = web.Application()
    app.router.add_get("/metrics", examples)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    other = f"127.0.0.1:{runner.addresses[0][1]}"
    address = proxy.url.removeprefix("http://")
    dead = f"127.0.0.1:{free_port('127.0.0.1')}"
    targets: list[dict[str, Any]] = [
        shipped_job([address, dead], tmp_path),
        {"job_name": "others", "static_configs": [{"targets": [other]}]},
    ]
    alerts = {
        rule["alert"]
        for group in yaml.safe_load(ALERTS.read_text())["groups"]
        for rule in group["rules"]
    }
    wanted = {"up == 1": True}
    for expression in expressions():
        if not any(name in expression for name in QUIET) and "run_metric" not in expression:
            # A rate needs two scrapes; a range of a minute has them sooner than five.
            wanted[expression] = True
    async with (
        asyncio.timeout(120),
        prometheus(tmp_path, targets) as url,
        aiohttp.ClientSession() as http,
    ):
        for _ in range(400):
            try:
                await _has(http, url, "up")
            except aiohttp.ClientError:
                await asyncio.sleep(0.2)
            else:
                break
        for expression in wanted:
            for _ in range(200):
                if await _has(http, url, expression):
                    break
                await asyncio.sleep(0.2)
            else:
                pytest.fail(f"no sample for {expression}")
        for expression in expressions():
            await _has(http, url, expression)  # Prometheus can read it
        for alert in alerts - {"CallsAreRefused"}:
            for _ in range(100):
                if await _has(http, url, f'ALERTS{{alertname="{alert}", alertstate="firing"}}'):
                    break
                await asyncio.sleep(0.2)
            else:
                pytest.fail(f"{alert} does not fire")
        async with http.get(f"{url}/rules") as response:
            groups = (await response.json())["data"]["groups"]
        loaded = {rule["name"] for group in groups for rule in group["rules"]}
        assert loaded == alerts
        assert all(rule["health"] == "ok" for group in groups for rule in group["rules"])
    await runner.cleanup()
