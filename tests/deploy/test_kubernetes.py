"""The manifests are valid for the API, build with kustomize, and are safe by default."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest

from tests.deploy.manifests import (
    KUSTOMIZE,
    NAMESPACES,
    OPERATORS,
    OVERLAYS,
    ROOT,
    needs_tools,
    pod_specs,
    pod_templates,
    render,
    source_resources,
)

API_VERSION = "1.33"
"""The oldest supported version: sidecars and their probes are stable since then."""
CUSTOM = ("ServiceMonitor", "RayJob")
"""Of operators; the Kubernetes API's schemas do not have them."""
AMOUNTS = ("requests", "limits")
"""Keys of a container's resources. Their types are in another package."""


def check(resource: dict[str, Any]) -> None:
    if resource["kind"] not in CUSTOM:
        kubernetes_validate.validate(resource, API_VERSION, strict=True)
    if resource["kind"] == "RayJob":  # its pods, since no package has the operator's definition
        for _, template in pod_templates([resource]):
            pod = {"apiVersion": "v1", "kind": "Pod", **template}
            kubernetes_validate.validate(pod, API_VERSION, strict=True)


def refusal(resource: dict[str, Any]) -> str:
    """Errors of a resource by its operator's definition; empty if it is valid."""
    kind = resource["kind"]
    validator = json.dumps((OPERATORS[kind] / f"{kind}.js").as_uri())
    program = f"""
    import {{ {kind} }} from {validator};
    try {{ new {kind}({json.dumps(resource)}).validate() }}
    catch (error) {{ process.stdout.write(error.message) }}
    """
    node = ["node", "--input-type=module", "--eval", program]
    said = subprocess.run(node, check=True, capture_output=True, text=True).stdout
    # The definition accepts unknown keys, as the API does. In our files they are misspelt keys.
    types = "".join(path.read_text() for path in OPERATORS[kind].glob("*.d.ts"))
    known = {"name", "key", "matchLabels", *AMOUNTS, *re.findall(r'^ +"(\w+)"\??:', types, re.M)}
    unknown = set(keys(resource["spec"])) - known
    return said or ", ".join(f"no resource has a key {key}" for key in sorted(unknown))


def keys(value: Any) -> Iterator[str]:
    """Keys of a resource's part at any depth, except of labels and amounts, which are free."""
    for key, item in value.items() if isinstance(value, dict) else ():
        yield key
        if key != "matchLabels" and key not in AMOUNTS:
            yield from keys(item)
    for item in value if isinstance(value, list) else ():
        yield from keys(item)


def test_every_resource_is_valid() -> None:
    resources = list(source_resources())
    assert len(resources) > 10
    for path, resource in resources:
        try:
            check(resource)
        except kubernetes_validate.ValidationError as error:
            pytest.fail(f"{path}: {resource['kind']}: {error}")


def test_validation_refuses_a_misspelt_key() -> None:
    _, deployment = next(item for item in source_resources() if item[1]["kind"] == "Deployment")
    deployment["spec"]["template"]["spec"]["terminationGraceSeconds"] = 1
    with pytest.raises(kubernetes_validate.ValidationError):
        check(deployment)


@needs_tools
def test_service_monitor_is_valid_for_the_prometheus_operator() -> None:
    (monitor,) = (each for _, each in source_resources() if each["kind"] == "ServiceMonitor")
    assert refusal(monitor) == ""
    (endpoint,) = monitor["spec"]["endpoints"]
    for wrong in ({"interval": "often"}, {"intervall": "15s"}, {"authorization": "a key"}):
        spec = monitor["spec"] | {"endpoints": [endpoint | wrong]}
        assert refusal(monitor | {"spec": spec}), wrong


@needs_tools
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_overlay_builds_to_valid_resources(overlay: str) -> None:
    resources = render(overlay)
    for resource in resources:
        check(resource)
    names = [(r["kind"], r["metadata"]["name"]) for r in resources]
    assert len(names) == len(set(names))
    assert {r["metadata"].get("namespace") for r in resources if r["kind"] != "Namespace"} == {
        NAMESPACES[overlay]
    }


@needs_tools
def test_page_names_the_images_of_a_registry(tmp_path: Path) -> None:
    """The kustomization of docs/kubernetes.md, in a folder beside k8s/."""
    page = (ROOT / "docs/kubernetes.md").read_text()
    written = re.search(r"^cat > my/kustomization.yaml <<END\n(.*?)^END$", page, re.M | re.S)
    assert written is not None
    shutil.copytree(ROOT / "k8s", tmp_path / "k8s")
    (tmp_path / "my").mkdir()
    (tmp_path / "my/kustomization.yaml").write_text(written[1])
    build = [str(KUSTOMIZE), "build", str(tmp_path / "my")]
    built = subprocess.run(build, check=True, capture_output=True, text=True).stdout
    images = {line.split()[-1] for line in built.splitlines() if " image: " in line}
    ours = {name for name in images if "agentic-" in name}
    assert ours == {f"registry.example.org/team/agentic-proxy:{version('agentic-rl')}"}
    assert ours < images


@needs_tools
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_references_of_a_pod_exist(overlay: str) -> None:
    resources = render(overlay)
    claims = {r["metadata"]["name"] for r in resources if r["kind"] == "PersistentVolumeClaim"}
    configs = {r["metadata"]["name"] for r in resources if r["kind"] == "ConfigMap"}
    given_by_the_user = {"agentic-model", "agentic-tasks"}
    for name, spec in pod_specs(resources):
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        (workload,) = [
            r for r in resources if f"{name}/".startswith(f"{r['kind']}/{r['metadata']['name']}/")
        ]
        templates = workload["spec"].get("volumeClaimTemplates", ())
        volumes |= {template["metadata"]["name"]: {} for template in templates}
        for container in (*spec.get("initContainers", ()), *spec["containers"]):
            mounts = {mount["name"] for mount in container["volumeMounts"]}
            assert mounts <= set(volumes), f"{name}/{container['name']}"
        for volume in volumes.values():
            claim = volume.get("persistentVolumeClaim", {}).get("claimName")
            assert claim is None or claim in claims | given_by_the_user
            config = volume.get("configMap", {}).get("name")
            assert config is None or config in configs
            kinds = [key for key in volume if key != "name"]
            assert len(kinds) <= 1, f"{name}: {volume}"


@needs_tools
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_selectors_match_pods(overlay: str) -> None:
    resources = render(overlay)
    labels = [template["metadata"]["labels"] for _, template in pod_templates(resources)]
    for resource in resources:
        spec = resource.get("spec", {})
        selector = spec.get("selector") or spec.get("podSelector")
        if resource["kind"] in ("Service", "PodDisruptionBudget", "NetworkPolicy") and selector:
            assert any(selects(selector, have) for have in labels), resource["metadata"]


def selects(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    """Whether a selector of labels, of a Service or of another resource, selects these labels."""
    expressions = selector.get("matchExpressions", [])
    if expressions or "matchLabels" in selector:
        selector = selector.get("matchLabels", {})
    listed = all(labels.get(each["key"]) in each["values"] for each in expressions)
    return listed and bool(selector.items() <= labels.items())


@pytest.mark.parametrize(
    "path_and_resource", list(source_resources()), ids=lambda item: item[0].stem
)
def test_pods_have_no_rights_that_they_do_not_need(
    path_and_resource: tuple[object, dict[str, Any]],
) -> None:
    for name, spec in pod_specs([path_and_resource[1]]):
        assert spec["automountServiceAccountToken"] is False, name
        assert spec["enableServiceLinks"] is False, f"{name}: Service variables would be settings"
        assert spec["securityContext"]["runAsNonRoot"] is True, name
        assert spec["securityContext"]["runAsUser"] > 0, name
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, name
        for container in (*spec.get("initContainers", ()), *spec["containers"]):
            context = container["securityContext"]
            assert context["allowPrivilegeEscalation"] is False, name
            assert context["capabilities"] == {"drop": ["ALL"]}, name
            assert container["name"] == "vllm" or context["readOnlyRootFilesystem"] is True, name
            assert container["resources"]["requests"], name
            assert "memory" in container["resources"]["limits"], name


def test_manifests_contain_no_secret() -> None:
    for path, resource in source_resources():
        assert resource["kind"] != "Secret", path
