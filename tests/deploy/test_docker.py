"""Checks the Dockerfiles and the compose file by reading them (`make images` builds the images)."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.deploy.manifests import ROOT, dockerfiles, instructions
from tests.needs import needs
from trainer.config_sources import load

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
    bases = [rest.split(" AS ")[0] for name, rest in steps if name == "FROM"]
    assert len(bases) > 1, "multi-stage"
    assert all(re.search(r":\d+\.\d+", base) for base in bases), bases
    (user,) = [rest for name, rest in steps if name == "USER"]
    assert int(user) > 0
    names = [name for name, _ in steps]
    assert "HEALTHCHECK" in names
    assert names.index("USER") > max(i for i, name in enumerate(names) if name in ("RUN", "COPY"))
    assert not any(name == "ADD" for name in names)


@pytest.mark.parametrize("dockerfile", dockerfiles(), ids=lambda path: path.stem)
def test_copied_files_are_in_the_build_context(dockerfile: Path) -> None:
    allowed = (ROOT / ".dockerignore").read_text().splitlines()
    for name, rest in instructions(dockerfile):
        if name == "COPY" and not rest.startswith("--from="):
            for source in rest.replace("${DEVICE}", "cpu").split()[:-1]:
                assert (ROOT / source).exists(), source
                top = "docker/*.lock" if source.startswith("docker/") else source.split("/")[0]
                assert f"!{top}" in allowed, source


@pytest.mark.parametrize("lock", sorted((ROOT / "docker").glob("*.lock")), ids=lambda p: p.name)
def test_lock_pins_every_package(lock: Path) -> None:
    lines = [line for line in lock.read_text().splitlines() if re.match(r"[a-zA-Z]", line)]
    assert len(lines) > 20
    assert all("==" in line for line in lines)


@pytest.mark.parametrize(
    ("lock", "extra"),
    [("proxy", None), ("trainer-cpu", "train"), ("trainer-cpu", "cpu"), ("trainer-cuda", "train")],
)
def test_lock_has_every_dependency_of_the_package(lock: str, extra: str | None) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = project["dependencies"]
    if extra is not None:
        needed = needed + project["optional-dependencies"][extra]
    names = {re.split(r"[^\w-]", each)[0] for each in needed} - {"agentic-rl"}
    text = (ROOT / f"docker/{lock}.lock").read_text()
    missing = {name for name in names if not re.search(rf"^{name}==", text, re.M)}
    assert not missing, "make locks"


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
@pytest.mark.parametrize("lock", sorted((ROOT / "docker").glob("*.lock")), ids=lambda p: p.name)
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
