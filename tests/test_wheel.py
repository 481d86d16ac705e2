"""The wheel, installed into empty environments: it has everything that its programs need."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

import openai
import pytest

from benchmarks.install import npm, same_index
from tests.needs import skip_or_fail
from tests.private_index import private_index, private_registry
from tests.proxy.checkpoint import write_checkpoint
from tests.proxy.rendering.harmony import write_harmony_tokenizer

ROOT = Path(__file__).parents[1]
SOURCES = ("proxy", "agent_loop", "trainer", "harbor_sdk", "examples")
FILES = ("pyproject.toml", "setup.py", "README.md", "LICENSE")
pytestmark = pytest.mark.programs
UV = [sys.executable, "-m", "uv"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy, because a build leaves files in its folder."""
    copy = tmp_path_factory.mktemp("source")
    for name in SOURCES:
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in FILES:
        shutil.copyfile(ROOT / name, copy / name)
    _run([*UV, "build", "-q", "--wheel", "--no-build-isolation", "--python", sys.executable], copy)
    (built,) = (copy / "dist").glob("*.whl")
    return built


@pytest.fixture(scope="module")
def base(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment in which only the wheel is installed."""
    return _installed(str(wheel), tmp_path_factory.mktemp("base"))


def test_wheel_has_every_file_of_the_packages_and_examples(base: Path) -> None:
    (site,) = base.parent.glob("lib/python*/site-packages")
    for source in SOURCES:
        installed = site / ("agentic_rl_examples" if source == "examples" else source)
        listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", source]
        names = _run(listed, ROOT).splitlines()
        missing = [n for n in names if not (installed / Path(n).relative_to(source)).exists()]
        assert not missing


def test_proxy_of_the_wheel_serves_and_records_a_call(base: Path, tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "model")
    engine = [sys.executable, "-m", "tests.attacks.engine_process", str(model), "0", "0"]
    with _running(engine, ROOT) as started:
        serve = [str(base / "agentic-proxy"), "serve", "--model", str(model), "--port", "0"]
        serve += ["--engine", started.splitlines()[0], "--auto-create"]
        with _running([*serve, "--store", f"sqlite:///{tmp_path}/s.db"], tmp_path, 2) as printed:
            url = printed.splitlines()[1].split()[1].partition("=")[2]
            with openai.OpenAI(base_url=url, api_key="any") as client:
                answer = client.chat.completions.create(
                    model="any", messages=[{"role": "user", "content": "hello"}]
                )
    assert "characters, thank you" in (answer.choices[0].message.content or "")
    listed = [
        str(base / "agentic-proxy"),
        "sessions",
        "list",
        "--store",
        f"sqlite:///{tmp_path}/s.db",
    ]
    assert url.split("/")[-2] in _run(listed, tmp_path)


RENDER = """
import sys
from importlib.metadata import distributions
from pathlib import Path
from proxy.config import RenderingConfig
from proxy.conversation import Conversation, Message
from proxy.rendering.rendering import Rendering
from proxy.rendering.tokenizer import load_tokenizer
dated = {"conversation_start_date": "2026-01-02"}
config = RenderingConfig(renderer="gpt-oss", template_kwargs=dated)
rendering = Rendering(load_tokenizer(Path(sys.argv[1])), config)
print(sorted(d.name for d in distributions() if d.name.endswith("-harmony")))
print(rendering.full(Conversation([Message("user", "Hi.")])).tolist())
"""


def test_gpt_oss_is_rendered_alike_whichever_package_of_harmony_wins(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's oss-harmony and renderers' openai-harmony have the same files; the second would
    download its vocabulary."""
    model = write_checkpoint(tmp_path / "model")
    write_harmony_tokenizer(model)
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    render = [str(base / "python"), "-c", RENDER, str(model)]
    alone, expected = _run(render, tmp_path).splitlines()
    assert alone == "['openai-harmony']"
    monkeypatch.delenv("HTTPS_PROXY")
    for last in ("oss-harmony", "openai-harmony"):
        again = ["install", "-q", "--no-deps", "--force-reinstall", last]
        _run([str(base / "pip"), *again], tmp_path)
        monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
        both, ids = _run(render, tmp_path).splitlines()
        monkeypatch.delenv("HTTPS_PROXY")
        assert both == "['openai-harmony', 'oss-harmony']"
        assert ids == expected


def test_wheel_without_extras_writes_projects_and_says_what_training_needs(
    base: Path, tmp_path: Path
) -> None:
    train = str(base / "agentic-train")
    _run([train, "init", "project"], tmp_path)
    refused = subprocess.run(
        [train, "--config", "agentic_trainer.yaml", "--check"],
        cwd=tmp_path / "project",
        capture_output=True,
        text=True,
        check=False,
    )
    assert refused.returncode == 2
    assert refused.stderr.startswith("agentic-train: the package 't")
    assert "install the wheel with its extra `cpu` or `gpu`" in refused.stderr
    assert refused.stderr.count("\n") == 1


@pytest.mark.parametrize("program", ["agentic-proxy", "agentic-train", "agentic-worker"])
def test_programs_of_the_wheel_print_its_version(base: Path, program: str, wheel: Path) -> None:
    assert wheel.name.split("-")[1] in _run([str(base / program), "--version"], ROOT)


def test_wheel_and_locks_are_installed_from_a_private_index_alone(
    wheel: Path, tmp_path: Path
) -> None:
    """With a password, by TLS of the company's own authority; nothing else can be reached."""
    with private_index(tmp_path) as index:
        own = index.environment | {"UV_CACHE_DIR": str(tmp_path / "cache")}
        env = own | {"UV_DEFAULT_INDEX": index.url}
        python = tmp_path / "env/bin/python"
        _run([*UV, "venv", "-q", "--seed", str(tmp_path / "env")], tmp_path, env)
        install = [*UV, "pip", "install", "-q", "--python", str(python)]
        _run([*install, str(wheel)], tmp_path, env)
        locked = ["--require-hashes", "--no-deps", "-r", str(ROOT / "docker/proxy.lock")]
        _run([*install, *locked], tmp_path, env)
        pip = own | {"PIP_INDEX_URL": index.url, "PIP_CERT": str(index.authority)}
        again = ["install", "-q", "--no-deps", "--no-cache-dir", "--force-reinstall", "tenacity"]
        before = len(index.files)
        _run([str(python), "-m", "pip", *again], tmp_path, pip)
        assert index.files[before].startswith("tenacity-")
        public = [*install, "iniconfig"]
        assert subprocess.run(public, env=own, capture_output=True, check=False).returncode
    program = [str(python.with_name("agentic-proxy")), "--version"]
    assert wheel.name.split("-")[1] in _run(program, tmp_path)


@pytest.mark.parametrize("given", ["PIP_INDEX_URL", "UV_DEFAULT_INDEX", "UV_INDEX_URL"])
def test_make_gives_pip_and_uv_the_same_index_and_authority(given: str) -> None:
    kept = {n: v for n, v in os.environ.items() if not n.startswith(("PIP_", "UV_"))}
    names = ("PIP_INDEX_URL", "UV_DEFAULT_INDEX", "PIP_CERT")
    show = "show: ; @echo " + " ".join(f"$${name}" for name in names)
    index = "https://me:secret@packages.corp/simple"
    given_here = {given: index, "SSL_CERT_FILE": "/ca.pem"}
    expected = [index, index, "/ca.pem"]
    assert _run(["make", "-s", "--eval", show, "show"], ROOT, kept | given_here).split() == expected
    same = same_index(given_here)
    assert [same[name] for name in names] == expected


def test_npm_installs_from_a_private_registry(tmp_path: Path) -> None:
    """What `make agents` and `benchmarks.install` run, with the registry that a company has set."""
    if shutil.which("npm") is None:
        skip_or_fail("npm is not on PATH")
    with private_registry(tmp_path) as url:
        env = {**os.environ, "npm_config_registry": url}
        _run(npm(tmp_path / "installed", "tool@1.0.0"), tmp_path, env)
    assert (tmp_path / "installed/node_modules/tool/package.json").is_file()


@pytest.mark.long
def test_wheel_with_the_cpu_extra_trains_a_new_project(wheel: Path, tmp_path: Path) -> None:
    programs = tmp_path / "env/bin"
    _run([sys.executable, "-m", "venv", str(programs.parent)], ROOT)
    # pip, because the configuration of this machine may have an index of torch's CPU builds.
    torch = f"torch=={version('torch').partition('+')[0]}"
    _run([str(programs / "pip"), "install", "-q", torch], tmp_path)
    overrides = (str(ROOT / f"docker/{name}_overrides.txt") for name in ("cpu", "vllm"))
    without = [word for each in overrides for word in ("--overrides", each)]
    install = [*UV, "pip", "install", "-q", *without, "--python", str(programs / "python")]
    _run([*install, f"{wheel}[cpu]", "openai"], tmp_path)
    train = str(programs / "agentic-train")
    _run([train, "init", "project"], tmp_path)
    run = [train, "--config", "agentic_trainer.yaml"]
    assert "path: model" in _run([*run, "--check"], tmp_path / "project")
    few = ["trainer.steps=2", "eval.limit=4", "rollout.groups_per_step=1"]
    printed = _run([*run, *few, "logging.progress=plain"], tmp_path / "project")
    assert "step 2/2" in printed
    assert "done after" in printed
    assert (tmp_path / "project/runs/first/report.html").exists()


def _installed(requirement: str, folder: Path) -> Path:
    """The programs of a new environment in which plain pip has installed the requirement."""
    _run([sys.executable, "-m", "venv", str(folder)], ROOT)
    _run([str(folder / "bin/pip"), "install", "-q", "--no-compile", requirement], folder)
    return folder / "bin"


def _run(argv: list[str], folder: Path, environment: Mapping[str, str] = os.environ) -> str:
    """The output of a program that must succeed. It sees no package of this repository."""
    env = {name: value for name, value in environment.items() if name != "PYTHONPATH"}
    done = subprocess.run(argv, cwd=folder, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@contextmanager
def _running(argv: list[str], folder: Path, lines: int = 1) -> Iterator[str]:
    """The first lines that a program prints; it is ended on exit."""
    with subprocess.Popen(argv, cwd=folder, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield "".join(process.stdout.readline() for _ in range(lines))
        finally:
            process.terminate()
