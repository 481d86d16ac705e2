"""Commands, ports, paths and variables of `docker/` and `k8s/` are those of the programs."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from harbor_sdk.server.config import ServerConfig
from proxy.admin_key import with_admin_key
from proxy.app import build_app
from proxy.cli import main
from proxy.config import SECTIONS, ProxyConfig, load_config
from proxy.extra_registry import section_type
from proxy.extras.relay.worker_config import WorkerConfig
from proxy.metrics import Metrics
from tests.deploy.manifests import (
    KUSTOMIZE,
    NAMESPACES,
    OVERLAYS,
    ROOT,
    SECRETS,
    Program,
    compose_programs,
    entrypoint,
    image_variables,
    needs_tools,
    pod_programs,
    render,
    source_resources,
)
from tests.proxy.checkpoint import write_checkpoint


def programs() -> Iterator[Program]:
    yield from compose_programs()
    if KUSTOMIZE.exists():
        for overlay in OVERLAYS:
            yield from pod_programs(render(overlay))
    else:
        yield from pod_programs([resource for _, resource in source_resources()])


def of_kind(*command: str) -> list[Program]:
    found = [p for p in programs() if p.command[: len(command)] == [*command]]
    assert found
    return found


def proxies() -> list[Program]:
    return of_kind("python3", "-m", "proxy", "serve")


Load = Callable[[Program], ProxyConfig]


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Load:
    """Reads a proxy's configuration from its variables, with secrets in files of the test."""

    def read(program: Program) -> ProxyConfig:
        image = image_variables(ROOT / "docker/proxy.Dockerfile")
        for name, value in {**image, **program.variables}.items():
            if name.startswith("AGENTIC_PROXY_"):
                monkeypatch.setenv(name, in_folder(value, tmp_path))
        return load_config(None)

    return read


def in_folder(value: str, folder: Path) -> str:
    """The value of a variable; in place of a mounted secret's path, that of a file of the test."""
    if not value.startswith(f"{SECRETS}/"):
        return value
    path = folder / value.removeprefix(f"{SECRETS}/").replace("/", "-")
    path.write_text("a-secret-of-the-tests\n")
    return str(path)


@pytest.mark.parametrize("program", proxies(), ids=lambda p: p.where)
def test_variables_of_a_proxy_are_its_settings(program: Program, load: Load) -> None:
    for name in program.variables:
        assert _setting(ProxyConfig, name.removeprefix("AGENTIC_PROXY_")), name
    config = load(program)
    assert config.admin_key is None, "secrets are files"
    assert with_admin_key(config).admin_key is not None
    assert config.store_url  # its password, if it has one, can be read
    assert not program.ports or program.ports == [config.port]
    assert not config.on_loopback


@pytest.mark.parametrize("program", proxies(), ids=lambda p: p.where)
def test_grace_period_of_a_proxy_is_longer_than_its_longest_call(
    program: Program, load: Load
) -> None:
    limits = load(program).limits
    assert limits.call_timeout_s <= limits.shutdown_s
    assert limits.unready_s + limits.shutdown_s + 10 <= program.stop_s


def test_probes_of_a_proxy_are_routes(tmp_path: Path) -> None:
    config = load_config(None, model=write_checkpoint(tmp_path), admin_key=SecretStr("k" * 16))
    routes = {r.resource.canonical for r in build_app(config).router.routes() if r.resource}
    probed = {path for program in proxies() for path, _ in program.probes}
    assert not KUSTOMIZE.exists() or probed == {"/health", "/ready"}
    assert probed <= routes
    monitors = [r for _, r in source_resources() if r["kind"] == "ServiceMonitor"]
    assert {e["path"] for m in monitors for e in m["spec"]["endpoints"]} <= routes


def test_metric_of_the_autoscaler_is_exposed() -> None:
    exposed = Metrics().exposition().decode()
    scalers = [r for _, r in source_resources() if r["kind"] == "HorizontalPodAutoscaler"]
    metrics = [m["pods"]["metric"]["name"] for s in scalers for m in s["spec"]["metrics"]]
    assert metrics
    assert all(f"# TYPE {name} gauge" in exposed for name in metrics)


def test_variables_of_a_worker_are_its_settings(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for program in of_kind("python3", "-m", "proxy.extras.relay"):
        for name, value in program.variables.items():
            if name == "FSSPEC_CONFIG_DIR":
                assert value.startswith(f"{SECRETS}/")
                continue
            assert _setting(WorkerConfig, name.removeprefix("AGENTIC_WORKER_")), name
            monkeypatch.setenv(name, in_folder(value, tmp_path))
        config = WorkerConfig()
        assert config.drain_s + 30 <= program.stop_s


VLLM_IMAGE = "docker.io/vllm/vllm-openai"


def test_vllm_listens_at_the_address_of_its_proxy_or_worker() -> None:
    servers = [p for p in programs() if p.where.endswith("/vllm") and "train" not in p.where]
    assert {p.image.partition(":")[0] for p in servers} == {VLLM_IMAGE, "agentic-trainer"}
    for server in servers:
        assert "--enable-scale-out" in server.command
        assert "--logprobs-mode=processed_logprobs" in server.command
        assert "--port=8001" in server.command
        assert server.ports in ([], [8001])
        (timeout,) = [a for a in server.command if a.startswith("--shutdown-timeout=")]
        assert 1800 <= float(timeout.partition("=")[2]) <= server.stop_s - 30, server.where
    for program in proxies():
        for engine in json.loads(program.variables.get("AGENTIC_PROXY_ENGINES", "[]")):
            assert engine["url"].endswith(":8001")
    for program in of_kind("python3", "-m", "proxy.extras.relay"):
        assert program.variables["AGENTIC_WORKER_ENGINE"] == "http://127.0.0.1:8001"


@needs_tools
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_proxy_has_engines_or_a_relay_and_a_store(overlay: str, load: Load) -> None:
    found = [p for p in pod_programs(render(overlay)) if p.command[-1:] == ["serve"]]
    assert len(found) == (NAMESPACES[overlay] == "agentic")
    for program in found:
        config = load(program)
        assert config.engines or config.relay.token
        assert config.store.startswith(("sqlite:////data/", "postgresql://"))


def test_images_run_the_programs(capsys: pytest.CaptureFixture[str]) -> None:
    assert entrypoint(ROOT / "docker/proxy.Dockerfile") == ["python3", "-m", "proxy"]
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    assert "--engine" in capsys.readouterr().out
    assert entrypoint(ROOT / "docker/trainer.Dockerfile") == ["agentic-train"]
    assert entrypoint(ROOT / "docker/harbor.Dockerfile") == ["python3", "-m", "harbor_sdk.server"]
    assert (ROOT / "harbor_sdk/server/__main__.py").exists()
    harbor = image_variables(ROOT / "docker/harbor.Dockerfile")
    settings = [name for name in harbor if name.startswith("HARBOR_SERVER_")]
    assert {s.removeprefix("HARBOR_SERVER_").lower() for s in settings} <= set(
        ServerConfig.model_fields
    )


def test_image_tags_are_the_version_of_the_package() -> None:
    files = [ROOT / "docker/compose.yaml", *(ROOT / "k8s").rglob("kustomization.yaml")]
    pattern = r"(?:newTag: |image: agentic-\w+:)(\S+)"
    tags = [tag for file in files for tag in re.findall(pattern, file.read_text())]
    assert set(tags) == {tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]}


def _setting(model: Any, name: str) -> bool:
    """Whether `LIMITS__SHUTDOWN_S` names a field of a field of `model`."""
    head, _, rest = name.lower().partition("__")
    if head not in model.model_fields:
        return False
    of_extra = model is ProxyConfig and head in SECTIONS
    section = section_type(head) if of_extra else model.model_fields[head].annotation
    return not rest or _setting(section, rest)
