"""The Helm chart: Helm installs from it what kustomize builds, changed by the chart's values.

Helm is real; the API server is scripted and records what Helm creates.
"""

from __future__ import annotations

import asyncio
import os
from copy import deepcopy
from pathlib import Path
from typing import Any

import orjson
import pytest
import yaml

from tests.deploy.api_server import api_server
from tests.deploy.manifests import OVERLAYS, ROOT, Resource, needs_tools, pod_specs, render
from tests.deploy.test_kubernetes import check
from tests.deploy.write_chart import write_chart
from tests.needs import needs

PYTHON = ROOT / ".cache/helm/bin/python"
HELM = Path(__file__).with_name("helm.py")
needs_helm = needs(
    None
    if PYTHON.exists()
    else f"no {PYTHON}: python -m benchmarks.install helm (needs Python 3.12)"
)


async def helm(*arguments: str) -> Any:
    process = await asyncio.create_subprocess_exec(
        *(str(PYTHON), str(HELM), *arguments), stdout=asyncio.subprocess.PIPE
    )
    output, _ = await process.communicate()
    assert process.returncode == 0
    return orjson.loads(output)


@pytest.fixture(scope="module")
def chart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As `make dist` writes it."""
    folder = tmp_path_factory.mktemp("helm") / "chart"
    write_chart(folder)
    return folder


async def installed(
    chart: Path, folder: Path, values: dict[str, Any]
) -> dict[tuple[str, str], Resource]:
    """What Helm creates with these values, by kind and name.

    Raises:
        ValueError: Helm refuses.
    """
    async with api_server() as server:
        file = folder / "values.json"
        file.write_bytes(orjson.dumps({"values": values, "kubeconfig": server.kubeconfig}))
        result = await helm("install", str(chart), str(file))
    if "error" in result:
        raise ValueError(result["error"])
    assert result == {"status": "deployed"}
    return {(r["kind"], r["metadata"]["name"]): r for r in server.created.values()}


def without_marks_of_helm(resource: Resource) -> Resource:
    found = deepcopy(resource)
    metadata = found["metadata"]
    metadata["labels"].pop("app.kubernetes.io/managed-by")
    notes = {k: v for k, v in metadata["annotations"].items() if not k.startswith("meta.helm.sh/")}
    metadata["annotations"] = notes
    found["metadata"] = {k: v for k, v in metadata.items() if v}
    return found


@needs_tools
def test_version_of_the_chart_is_the_one_of_the_images(chart: Path) -> None:
    described = yaml.safe_load((chart / "Chart.yaml").read_text())
    assert described["version"] == described["appVersion"]
    assert f":{described['appVersion']}\n" in (chart / "objects/single.yaml").read_text()


@needs_tools
@needs_helm
async def test_helm_lint_finds_no_error_and_no_warning(chart: Path) -> None:
    result = await helm("lint", str(chart))
    info = 1
    assert result["Errors"] is None
    assert [m for m in result["Messages"] if m["Severity"] > info] == []


@needs_tools
@needs_helm
@pytest.mark.parametrize("overlay", OVERLAYS)
async def test_helm_installs_what_kustomize_builds(
    chart: Path, overlay: str, tmp_path: Path
) -> None:
    created = await installed(chart, tmp_path, {"overlay": overlay})
    wanted = [each for each in render(overlay) if each["kind"] != "Namespace"]
    assert len(created) == len(wanted)
    for resource in wanted:
        found = created[resource["kind"], resource["metadata"]["name"]]
        check(found)
        assert without_marks_of_helm(found) == resource


@needs_tools
@needs_helm
async def test_values_change_images_claims_host_and_configuration(
    chart: Path, tmp_path: Path
) -> None:
    created = await installed(
        chart,
        tmp_path,
        {
            "overlay": "train",
            "images": {"registry": "registry.example.org/x", "tag": "2", "pullSecrets": ["pull"]},
            "claims": {"model": "qwen3"},
            "trainer": {"trainer": {"steps": 7}},
            "resources": {"PersistentVolumeClaim/agentic-runs": {"spec": {"volumeName": "disk"}}},
        },
    )
    spec = created["Job", "agentic-train"]["spec"]["template"]["spec"]
    assert spec["containers"][0]["image"] == "registry.example.org/x/agentic-trainer:2"
    assert spec["imagePullSecrets"] == [{"name": "pull"}]
    claims = [v.get("persistentVolumeClaim", {}).get("claimName") for v in spec["volumes"]]
    assert "qwen3" in claims
    assert "agentic-tasks" in claims
    text = created["ConfigMap", "agentic-train"]["data"]["agentic_trainer.yaml"]
    trainer = yaml.safe_load(text)["trainer"]
    assert (trainer["steps"], trainer["resume"]) == (7, "auto")
    runs = created["PersistentVolumeClaim", "agentic-runs"]["spec"]
    assert runs["volumeName"] == "disk"
    assert runs["accessModes"] == ["ReadWriteMany"]


@needs_tools
@needs_helm
async def test_digests_replace_tags_of_images(chart: Path, tmp_path: Path) -> None:
    ours, theirs = f"sha256:{1:064x}", f"sha256:{2:064x}"
    digests = {"agentic-proxy": ours, "vllm-openai": theirs}
    images = {"registry": "r.example.org", "digests": digests}
    created = await installed(chart, tmp_path, {"overlay": "single", "images": images})
    assert sorted(images_of(list(created.values()))) == [
        f"docker.io/vllm/vllm-openai@{theirs}",
        f"r.example.org/agentic-proxy@{ours}",
    ]


@needs_tools
def test_kustomize_sets_digests_of_images(tmp_path: Path) -> None:
    digest = f"sha256:{1:064x}"
    overlay = {
        "resources": [os.path.relpath(ROOT / "k8s/overlays/train", tmp_path.resolve())],
        "images": [{"name": "agentic-trainer", "newName": "r.example.org/t", "digest": digest}],
    }
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(overlay))
    assert f"r.example.org/t@{digest}" in images_of(render(str(tmp_path)))


def images_of(resources: list[Resource]) -> set[str]:
    return {each["image"] for _, spec in pod_specs(resources) for each in spec["containers"]}


@needs_tools
@needs_helm
async def test_fields_of_a_container_replace_those_of_the_same_name(
    chart: Path, tmp_path: Path
) -> None:
    level = {"name": "AGENTIC_PROXY_LOG_LEVEL", "value": "debug"}
    log = {"name": "AGENTIC_PROXY_LOG", "value": "text"}
    created = await installed(
        chart,
        tmp_path,
        {
            "overlay": "relay/proxy",
            "host": "agents.example.net",
            "containers": {"Deployment/agentic-proxy": {"proxy": {"env": [level, log]}}},
        },
    )
    (container,) = created["Deployment", "agentic-proxy"]["spec"]["template"]["spec"]["containers"]
    variables = {each["name"]: each.get("value") for each in container["env"]}
    assert len(variables) == len(container["env"])
    assert variables["AGENTIC_PROXY_LOG"] == "text"
    assert variables["AGENTIC_PROXY_LOG_LEVEL"] == "debug"
    assert variables["AGENTIC_PROXY_PUBLIC_URL"] == "https://agents.example.net"
    assert created["Ingress", "agentic-proxy"]["spec"]["rules"][0]["host"] == "agents.example.net"


@needs_tools
@needs_helm
@pytest.mark.parametrize("overlay", ["relay/workers", "relay/train"])
async def test_workers_and_run_get_the_place_of_weights_by_one_value(
    chart: Path, overlay: str, tmp_path: Path
) -> None:
    created = await installed(
        chart, tmp_path, {"overlay": overlay, "weights": "gs://other/weights"}
    )
    ((worker_or_run, *_),) = [
        spec["containers"]
        for name, spec in pod_specs(list(created.values()))
        if name in ("Deployment/agentic-worker", "Job/agentic-train")
    ]
    words = [*worker_or_run["command"], *(each.get("value") for each in worker_or_run["env"])]
    assert {"gs://other/weights", "engine.publish=gs://other/weights"} & set(words)
    assert "s3://bucket/weights" not in repr(created)


@needs_tools
@needs_helm
@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"overlay": "double"}, "overlay"),
        ({"replicas": 3}, "replicas"),
        ({"overlay": "relay/workers", "weights": "bucket/weights"}, "weights"),
        ({"resources": {"Deployment/vllm": {}}}, "overlay single has no such resource"),
        ({"images": {"digests": {"agentic-proxy": "1"}}}, "digests"),
        (
            {"images": {"digests": {"agentic-trainer": f"sha256:{1:064x}"}}},
            "overlay single has no image agentic-trainer",
        ),
        ({"trainer": {"trainer": {"steps": 7}}}, "overlay single has no run to configure"),
        (
            {"overlay": "relay/train", "trainer": {"trainer": {"ranks": 4}}},
            "trainer.ranks has no effect, because .* has trainer.ranks=8; change the command",
        ),
        (
            {"overlay": "relay/train", "trainer": {"proxy_server": {"url": "https://other"}}},
            "proxy_server.url has no effect",
        ),
        (
            {"overlay": "train", "containers": {"Job/agentic-train": {"trainr": {}}}},
            "Job/agentic-train has no container trainr; it has trainer",
        ),
    ],
)
async def test_wrong_value_is_refused(
    chart: Path, values: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=said):
        await installed(chart, tmp_path, values)
