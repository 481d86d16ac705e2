"""The Dockerfiles and the compose file, as far as reading them goes (`make images` builds them)."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.deploy.manifests import ROOT, dockerfiles, instructions

HADOLINT = shutil.which("hadolint", path=str(Path(sys.executable).parent))


def test_the_linter_has_nothing_to_say() -> None:
    assert HADOLINT is not None
    lint = [HADOLINT, "--config", str(ROOT / "docker/hadolint.yaml"), *map(str, dockerfiles())]
    result = subprocess.run(lint, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize("dockerfile", dockerfiles(), ids=lambda path: path.stem)
def test_an_image_is_pinned_small_in_rights_and_watched(dockerfile: Path) -> None:
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
def test_what_an_image_copies_is_sent_to_the_builder(dockerfile: Path) -> None:
    allowed = (ROOT / ".dockerignore").read_text().splitlines()
    for name, rest in instructions(dockerfile):
        if name == "COPY" and not rest.startswith("--from="):
            for source in rest.replace("${DEVICE}", "cpu").split()[:-1]:
                assert (ROOT / source).exists(), source
                top = "docker/*.lock" if source.startswith("docker/") else source.split("/")[0]
                assert f"!{top}" in allowed, source


@pytest.mark.parametrize("lock", sorted((ROOT / "docker").glob("*.lock")), ids=lambda p: p.name)
def test_a_lock_pins_every_package(lock: Path) -> None:
    lines = [line for line in lock.read_text().splitlines() if re.match(r"[a-zA-Z]", line)]
    assert len(lines) > 20
    assert all("==" in line for line in lines)


@pytest.mark.parametrize(
    ("lock", "extra"),
    [("proxy", None), ("trainer-cpu", "train"), ("trainer-cpu", "cpu"), ("trainer-cuda", "train")],
)
def test_a_lock_has_what_the_package_needs(lock: str, extra: str | None) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = project["dependencies"]
    if extra is not None:
        needed = needed + project["optional-dependencies"][extra]
    names = {re.split(r"[^\w-]", each)[0] for each in needed} - {"agentic-rl"}
    text = (ROOT / f"docker/{lock}.lock").read_text()
    missing = {name for name in names if not re.search(rf"^{name}==", text, re.M)}
    assert not missing, "make locks"


def test_the_proxys_image_has_no_torch() -> None:
    packages = re.findall(r"^([a-z0-9-]+)==", (ROOT / "docker/proxy.lock").read_text(), re.M)
    assert "aiohttp" in packages
    assert not {"torch", "vllm", "transformers", "triton"} & set(packages)
