"""Runs on Kubernetes: their configurations, engines and connections fit together."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from harbor_sdk.server.config import ServerConfig
from proxy.admin_key import FILE_VARIABLE
from proxy.engines.vllm_server import VllmConfig, VllmServer, server_environment
from tests.deploy.manifests import (
    NAMESPACES,
    ROOT,
    SECRETS,
    Program,
    Resource,
    needs_tools,
    pod_programs,
    pod_templates,
    render,
)
from tests.deploy.test_kubernetes import selects
from trainer.config import TrainerConfig
from trainer.settings.sources import load

pytestmark = needs_tools
RUNS = ("train", "train_ray", "relay/train")


def trainer_of(overlay: str) -> Program:
    (found,) = [p for p in pod_programs(render(overlay)) if _is_trainer(p)]
    return found


def _is_trainer(program: Program) -> bool:
    return program.where.rpartition("/")[2] in ("trainer", "ray-head")


def resources(overlay: str, kind: str) -> dict[str, Resource]:
    return {r["metadata"]["name"]: r for r in render(overlay) if r["kind"] == kind}


def command(overlay: str) -> list[str]:
    for job in resources(overlay, "RayJob").values():
        return shlex.split(job["spec"]["entrypoint"])
    return trainer_of(overlay).command


def configuration(overlay: str, tmp_path: Path) -> TrainerConfig:
    """The configuration of the overlay's run, from the ConfigMap and the command."""
    for config in resources(overlay, "ConfigMap").values():
        (tmp_path / "agentic_trainer.yaml").write_text(config["data"]["agentic_trainer.yaml"])
    program, *words = command(overlay)
    assert program == "agentic-train"
    joined = " ".join(words).replace("--config ", "--config=").split()
    files = [tmp_path / Path(w).name for w in joined if w.startswith("--config=")]
    assert files
    return load(files, [word for word in joined if not word.startswith("--")])


@pytest.mark.parametrize("overlay", RUNS)
def test_configuration_is_valid_and_continues_its_run_on_the_volume(
    overlay: str, tmp_path: Path
) -> None:
    config = configuration(overlay, tmp_path)
    assert config.trainer.resume == "auto"
    (spec,) = [t["spec"] for n, t in pod_templates(render(overlay)) if _is_pod_of_trainer(t)]
    (container,) = spec["containers"]
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    runs = volumes[mounts["/" + config.trainer.run_dir.parts[1]]]
    assert runs["persistentVolumeClaim"]["claimName"] in resources(overlay, "PersistentVolumeClaim")
    assert str(config.model.path) in mounts
    assert not any(
        mount.get("readOnly") for mount in container["volumeMounts"] if mount["name"] == "runs"
    )


def _is_pod_of_trainer(template: dict[str, Any]) -> bool:
    return template["spec"]["containers"][0]["name"] in ("trainer", "ray-head")


@pytest.mark.parametrize("overlay", ["train", "train_ray"])
def test_agents_reach_the_proxy_of_the_run_by_its_service(overlay: str, tmp_path: Path) -> None:
    server = configuration(overlay, tmp_path).proxy_server
    assert server.host == "0.0.0.0"
    assert server.port in trainer_of(overlay).ports
    name, _, namespace = (server.llm_proxy_ip or "").partition(".")
    assert namespace == NAMESPACES[overlay]
    service = resources(overlay, "Service")[name]
    assert server.port in [port["port"] for port in service["spec"]["ports"]]
    labels = [
        t["metadata"]["labels"] for _, t in pod_templates(render(overlay)) if _is_pod_of_trainer(t)
    ]
    assert selects(service["spec"]["selector"], labels[0])


@pytest.mark.parametrize("overlay", RUNS)
def test_trainer_and_harbor_server_have_one_token_and_one_address(
    overlay: str, tmp_path: Path
) -> None:
    (harbor,) = [p for p in pod_programs(render(overlay)) if p.where.endswith("/harbor")]
    names = {name.removeprefix("HARBOR_SERVER_").lower() for name in harbor.variables}
    assert names <= set(ServerConfig.model_fields)
    assert harbor.variables["HARBOR_SERVER_STATE_DIR"] == "/data"
    assert (
        configuration(overlay, tmp_path).remote_agent.harbor.server_url
        == "http://agentic-harbor:8090"
    )
    assert harbor.ports == [8090]
    of_trainer = trainer_of(overlay).variables["HARBOR_SERVER_TOKEN_FILE"]
    secrets = mounted_secrets(overlay)
    assert secrets["/data/token"] == ("agentic-harbor", "harbor-token")
    assert of_trainer == f"{SECRETS}/harbor/harbor-token"
    assert secrets[f"{SECRETS}/harbor"] == ("agentic-harbor", None)


def mounted_secrets(overlay: str) -> dict[str, tuple[str, str | None]]:
    """Path in the first container of a pod → the secret that is mounted there, and which key."""
    secrets = {}
    for _, template in pod_templates(render(overlay)):
        volumes = {volume["name"]: volume for volume in template["spec"]["volumes"]}
        for mount in template["spec"]["containers"][0]["volumeMounts"]:
            if "secret" in volumes.get(mount["name"], {}):
                path = mount["mountPath"]
                secrets[path] = volumes[mount["name"]]["secret"]["secretName"], mount.get("subPath")
    return secrets


@pytest.mark.parametrize("overlay", NAMESPACES)
def test_no_mount_makes_a_folder_of_root_in_another_volume(overlay: str) -> None:
    for name, template in pod_templates(render(overlay)):
        for container in template["spec"]["containers"]:
            paths = {Path(mount["mountPath"]) for mount in container["volumeMounts"]}
            for path in paths:
                inside = paths & set(path.parents)
                assert not inside or path.parent in inside, f"{name}: {path}"


@pytest.mark.parametrize("lock", ["trainer-cpu.lock", "trainer-cuda.lock"])
def test_ray_version_is_the_one_of_the_image(lock: str) -> None:
    (job,) = resources("train_ray", "RayJob").values()
    version = job["spec"]["rayClusterSpec"]["rayVersion"]
    locked = (line.partition(" ")[0] for line in (ROOT / "docker" / lock).read_text().splitlines())
    assert f"ray=={version}" in locked
    by_http = (2, 53)  # KubeRay probes older versions by wget
    assert tuple(map(int, version.split(".")[:2])) >= by_http


def test_engines_accept_weights_as_those_that_a_run_starts(tmp_path: Path) -> None:
    (engine,) = [p for p in pod_programs(render("relay/workers")) if p.where.endswith("/vllm")]
    assert engine.image == trainer_of("relay/train").image
    config = configuration("relay/train", tmp_path)
    ours = VllmConfig(weight_transfer="shm", args=["--shutdown-timeout", "1800"])
    (tmp_path / "config.json").write_text("{}")
    dtype = config.engine.served_dtype(config.model)
    server = VllmServer(ours, tmp_path, log=tmp_path / "log", dtype=dtype)
    begin = server.command(3).index("--dtype")
    of_this_machine = ("--disable-uvicorn-access-log", "--enforce-eager", "--host", "--port")
    wanted = [w for w in server.command(3)[begin:] if w not in of_this_machine]
    for word in ("--seed", "0", server.host, str(server.port)):
        wanted.remove(word)
    assert "--host=127.0.0.1" in engine.command  # only its own pod reaches it: it has no key
    at = wanted.index("proxy.engines.vllm_key.RequireKey") - 1
    del wanted[at : at + 2]
    given = [word for argument in engine.command for word in argument.split("=", 1)]
    assert [word for word in wanted if word not in given] == []
    assert given[given.index("--dtype") + 1] == dtype == "bfloat16"
    assert json.dumps({"backend": "shm"}) in given
    environment = server_environment(ours)
    for name in ("VLLM_SERVER_DEV_MODE", "VLLM_NO_USAGE_STATS"):
        assert engine.variables[name] == environment[name]
    assert engine.stop_s >= 1800 + 30


def test_run_and_workers_use_one_proxy_and_one_place_for_weights(tmp_path: Path) -> None:
    config = configuration("relay/train", tmp_path)
    (worker,) = [p for p in pod_programs(render("relay/workers")) if p.where.endswith("/worker")]
    (proxy,) = [p for p in pod_programs(render("relay/proxy")) if p.command[-1:] == ["serve"]]
    assert config.engine.publish == worker.variables["AGENTIC_WORKER_WEIGHTS_URL"]
    assert config.proxy_server.url == proxy.variables["AGENTIC_PROXY_PUBLIC_URL"]
    assert config.engine.replicas == 0
    access = Path(worker.variables["FSSPEC_CONFIG_DIR"])
    for overlay in ("relay/workers", "relay/train"):
        assert mounted_secrets(overlay)[str(access)] == ("agentic-weights", None)
    trainer = trainer_of("relay/train")
    assert trainer.variables["FSSPEC_CONFIG_DIR"] == str(access)
    key = Path(trainer.variables[FILE_VARIABLE])
    assert mounted_secrets("relay/train")[str(key.parent)] == ("agentic-proxy-key", None)
    assert key.name == Path(proxy.variables[FILE_VARIABLE]).name


def test_worker_and_its_engine_have_one_folder_for_pulled_weights() -> None:
    ((_, template),) = pod_templates(render("relay/workers"))
    (engine,), (worker,) = template["spec"]["initContainers"], template["spec"]["containers"]
    folder = {v["name"]: v.get("value") for v in worker["env"]}["AGENTIC_WORKER_WEIGHTS_FOLDER"]
    shared = {"name": "weights", "mountPath": folder}
    assert shared in engine["volumeMounts"]
    assert shared in worker["volumeMounts"]
    (volume,) = [each for each in template["spec"]["volumes"] if each["name"] == "weights"]
    assert "emptyDir" in volume


def test_nothing_connects_to_a_run_whose_engines_and_agents_are_elsewhere() -> None:
    policies = resources("relay/train", "NetworkPolicy")
    labels = dict(pod_templates(render("relay/train")))["Job/agentic-train"]["metadata"]["labels"]
    assert policies["deny-ingress"]["spec"] == {"podSelector": {}, "policyTypes": ["Ingress"]}
    selecting = [n for n, p in policies.items() if selects(p["spec"]["podSelector"], labels)]
    assert selecting == ["deny-ingress"]
    services = resources("relay/train", "Service").values()
    assert not [s for s in services if selects(s["spec"]["selector"], labels)]
    assert trainer_of("relay/train").ports == []


def test_replaced_pod_of_a_job_is_the_only_one_and_a_wrong_configuration_is_final() -> None:
    spec = resources("train", "Job")["agentic-train"]["spec"]
    assert spec["podReplacementPolicy"] == "Failed"
    actions = {rule["action"]: rule for rule in spec["podFailurePolicy"]["rules"]}
    assert actions["FailJob"]["onExitCodes"]["values"] == [2]
    assert actions["Ignore"]["onPodConditions"][0]["type"] == "DisruptionTarget"
    assert spec["template"]["spec"]["restartPolicy"] == "Never"


@pytest.mark.parametrize("overlay", NAMESPACES)
def test_secrets_are_files_and_not_variables(overlay: str) -> None:
    for name, template in pod_templates(render(overlay)):
        for container in (
            *template["spec"].get("initContainers", ()),
            *template["spec"]["containers"],
        ):
            for variable in container.get("env", ()):
                assert "secretKeyRef" not in variable.get("valueFrom", {}), f"{name}: {variable}"


@pytest.mark.parametrize("overlay", NAMESPACES)
def test_images_have_a_version(overlay: str) -> None:
    for program in pod_programs(render(overlay)):
        assert ":" in program.image, f"{program.where}: {program.image}"


def test_scrape_key_is_a_secret_of_its_own() -> None:
    (monitor,) = resources("single", "ServiceMonitor").values()
    (endpoint,) = monitor["spec"]["endpoints"]
    credentials = endpoint["authorization"]["credentials"]
    (proxy,) = [p for p in pod_programs(render("single")) if p.command[-1:] == ["serve"]]
    assert proxy.variables["AGENTIC_PROXY_METRICS_KEY_FILE"].endswith(f"/{credentials['key']}")
    assert credentials["name"] != "agentic-secrets"
    assert credentials["key"] not in proxy.variables["AGENTIC_PROXY_ADMIN_KEY_FILE"]


def test_workers_dial_the_host_of_the_ingress() -> None:
    (ingress,) = resources("relay/proxy", "Ingress").values()
    ((host,),) = [tls["hosts"] for tls in ingress["spec"]["tls"]]
    assert [rule["host"] for rule in ingress["spec"]["rules"]] == [host]
    (worker,) = [p for p in pod_programs(render("relay/workers")) if p.where.endswith("/worker")]
    assert worker.variables["AGENTIC_WORKER_PROXY"] == f"wss://{host}"
    (proxy,) = [p for p in pod_programs(render("relay/proxy")) if p.command[-1:] == ["serve"]]
    assert proxy.variables["AGENTIC_PROXY_PUBLIC_URL"] == f"https://{host}"


@pytest.mark.parametrize("overlay", ["single", "postgres", "relay/workers"])
def test_replicated_pods_have_a_disruption_budget(overlay: str) -> None:
    budgets = [b["spec"]["selector"] for b in resources(overlay, "PodDisruptionBudget").values()]
    for kind in ("Deployment", "StatefulSet"):
        for name, resource in resources(overlay, kind).items():
            if resource["spec"].get("replicas", 2) > 1:
                labels = resource["spec"]["template"]["metadata"]["labels"]
                assert any(selects(budget, labels) for budget in budgets), name


def test_vllm_of_compose_has_no_root_and_no_access_to_the_hosts_memory() -> None:
    vllm = yaml.safe_load((ROOT / "docker/compose.yaml").read_text())["services"]["vllm"]
    assert "ipc" not in vllm
    assert vllm["shm_size"] == "8g"
    assert int(vllm["user"].partition(":")[0]) > 0
    assert vllm["read_only"] is True


def test_component_gives_access_for_copies_of_checkpoints_too(tmp_path: Path) -> None:
    """To a run that publishes nothing."""
    folder = tmp_path.resolve()
    overlay = {
        "resources": [os.path.relpath(ROOT / "k8s/overlays/train", folder)],
        "components": [os.path.relpath(ROOT / "k8s/components/published_weights", folder)],
    }
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(overlay))
    folder_of_access = trainer_of(str(tmp_path)).variables["FSSPEC_CONFIG_DIR"]
    assert mounted_secrets(str(tmp_path))[folder_of_access] == ("agentic-weights", None)
