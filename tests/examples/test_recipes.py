"""The recipes: each composition of model, GPUs and agent is complete and fits on its GPUs by the
plan; each task's fault is one that its hidden test finds."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest
import yaml
from PIL import Image

from benchmarks.gpu.parts import RECIPE, Part, further
from examples.recipes.make_tasks import FAULTS, Fault, write_task
from examples.recipes.published import qwen3_5_4b, qwen3_8b, qwen3_vl_4b
from proxy.engines import vllm_platform
from trainer import assembly, start
from trainer.cli import main
from trainer.cluster.device_plan import Gpu, plan_devices
from trainer.policy import memory
from trainer.settings.sources import load

ROOT = Path(__file__).parents[2]
RECIPES = Path("examples/recipes")
AGENTS = sorted(path.stem for path in (ROOT / RECIPES / "agents").iterdir())
H100 = Gpu("H100 80GB", 80 * 2**30)
PUBLISHED = {"qwen3-8b": qwen3_8b, "qwen3.5-4b": qwen3_5_4b, "qwen3-vl-4b": qwen3_vl_4b}
RANK_OF_8B = "rank 0, 68.8 GiB (weights 31.2 GiB, gradients 0.7 GiB, optimizer 1.3 GiB, activations"
REST = "; 0.8 GiB of CUDA for each, 1.0 GiB for nobody"
PLANS: Mapping[tuple[str, int], tuple[str, ...]] = MappingProxyType(
    {
        ("qwen3-8b", 1): (
            f"{RANK_OF_8B} 35.7 GiB) + engine 0, 53% of the memory (weights 15.3 "
            f"GiB, cache of 25.1 GiB, about 183,089 tokens){REST}",
        ),
        ("qwen3-8b", 8): (
            "rank 0, 69.9 GiB (weights 7.6 GiB, gradients 7.6 GiB, optimizer 15.3 GiB, gathered "
            f"3.8 GiB, activations 35.7 GiB){REST}",
            "engine 0, 92% of the memory (weights 15.3 GiB, cache of 56.3 GiB, about 410,281 "
            f"tokens){REST}",
        ),
        ("qwen3-vl-4b", 1): (
            "rank 0, 67.9 GiB (weights 17.2 GiB, gradients 16.4 GiB, optimizer 8.2 GiB, "
            "activations 24.4 GiB, prefixes 1.6 GiB) + engine 0, 63% of the memory (weights "
            f"8.2 GiB, cache of 40.2 GiB, about 292,604 tokens){REST}",
        ),
        ("qwen3-vl-4b", 8): (
            "rank 0, 45.4 GiB (weights 4.9 GiB, gradients 4.1 GiB, optimizer 8.2 GiB, gathered "
            f"2.2 GiB, activations 24.4 GiB, prefixes 1.6 GiB){REST}",
            "engine 0, 92% of the memory (weights 8.2 GiB, cache of 63.4 GiB, about 461,541 "
            f"tokens){REST}",
        ),
        ("qwen3.5-4b", 1): (
            "rank 0, 74.4 GiB (weights 15.7 GiB, gradients 15.7 GiB, optimizer 7.8 GiB, "
            f"activations 35.2 GiB) + engine 0, 65% of the memory (weights "
            "7.8 GiB, cache of 42.2 GiB, about 1,381,701 tokens; the state of a sequence takes the "
            f"place of 1,572){REST}",
        ),
        ("qwen3.5-4b", 8): (
            "rank 0, 52.9 GiB (weights 3.9 GiB, gradients 3.9 GiB, optimizer 7.8 GiB, gathered "
            f"2.0 GiB, activations 35.2 GiB){REST}",
            "engine 0, 92% of the memory (weights 7.8 GiB, cache of 63.8 GiB, about 2,089,490 "
            f"tokens; the state of a sequence takes the place of 1,572){REST}",
        ),
    }
)
"""Model and number of GPUs → what the plan says of the first GPU of ranks, and of engines."""


def on_gpus(monkeypatch: pytest.MonkeyPatch, *gpus: Gpu) -> None:
    """Makes this machine one with these GPUs and a vLLM for them."""
    for module in (assembly, start):
        monkeypatch.setattr(module, "gpus_here", lambda: gpus)
    monkeypatch.setattr(vllm_platform, "installed", lambda: vllm_platform.GPU)


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The published `config.json` of each model, with a small tokenizer."""
    folder = tmp_path_factory.mktemp("published")
    for name, settings in PUBLISHED.items():
        settings().save_pretrained(folder / name)
        for file in (ROOT / "examples/quickstart/model").glob("*t*k*.json"):
            (folder / name / file.name).symlink_to(file)
    return folder


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with the tasks."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    for fault in FAULTS:
        write_task(tmp_path / ".cache/recipes/tasks/train", fault)
        write_task(tmp_path / ".cache/recipes/tasks/heldout", fault)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def layers(model: str, agent: str, *more: str) -> list[Path]:
    names = ("swe", f"models/{model}", f"agents/{agent}", *more)
    return [RECIPES / f"{name}.yaml" for name in names]


@pytest.mark.parametrize(("model", "gpus"), PLANS)
@pytest.mark.parametrize("agent", AGENTS)
def test_recipe_is_complete_and_its_plan_fits(
    model: str,
    gpus: int,
    agent: str,
    published: Path,
    here: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(memory, "has_fla", lambda: True)
    path = f"model.path={published / model}"
    files = layers(model, agent, *(["eight_gpus"] if gpus == 8 else []))
    devices = (H100,) * gpus
    on_gpus(monkeypatch, *devices)
    words = [word for file in files for word in ("--config", str(file))]
    assert main([*words, "--check", path]) == 0
    out = capsys.readouterr().out
    printed = yaml.safe_load(out)
    assert (printed["model"]["lora"] is None) == ((model, gpus) != ("qwen3-8b", 1))
    plan = plan_devices(load(files, [path]), devices)
    assert plan is not None
    lines = list(plan.describe())
    assert "--enforce-eager" not in out
    assert out.endswith("".join(f"# {line}\n" for line in lines))
    shown = [lines[0], *lines[4:5]]
    wanted = PLANS[model, gpus]
    assert [line.partition("GiB): ")[2] for line in shown] == list(wanted)


@pytest.mark.parametrize("more", [(), ("eight_gpus",)])
def test_qwen3_5_reads_images_with_the_tower_that_it_has(
    more: tuple[str, ...], published: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_task(here / ".cache/recipes/pictures/train", FAULTS[0], picture=True)
    write_task(here / ".cache/recipes/pictures/heldout", FAULTS[-1], picture=True)
    monkeypatch.setattr(memory, "has_fla", lambda: True)
    devices = (H100,) * (8 if more else 1)
    on_gpus(monkeypatch, *devices)
    files = layers("qwen3.5-4b", "codex", *more, "images")
    words = [word for file in files for word in ("--config", str(file))]
    path = f"model.path={published / 'qwen3.5-4b'}"
    assert main([*words, "--check", path]) == 0
    config = load(files, [path])
    assert (config.model.vision, config.engine.args) == ("frozen", ())
    assert "pictures" in str(config.data.harbor.train_dir)
    assert plan_devices(config, devices) is not None


def test_qwen3_5_without_fla_does_not_fit_on_one_gpu(
    published: Path, here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    on_gpus(monkeypatch, H100)
    monkeypatch.setattr(memory, "has_fla", lambda: False)
    # What is kept grows with the tokens alone, and a pass without fla is a loop over them.
    monkeypatch.setattr(memory, "SAMPLED_TOKENS", 512)
    words = [word for file in layers("qwen3.5-4b", "codex") for word in ("--config", str(file))]
    # Another batch size than in the tests before, whose plans are kept.
    given = [f"model.path={published / 'qwen3.5-4b'}", "rollout.concurrency=31"]
    assert main([*words, "--check", *given]) == 2
    assert "a rank needs 91." in (said := capsys.readouterr().err)
    assert "pip install flash-linear-attention" in said


def test_all_weights_of_qwen3_8b_do_not_fit_on_one_gpu(
    published: Path, here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    on_gpus(monkeypatch, H100)
    words = [word for file in layers("qwen3-8b", "codex") for word in ("--config", str(file))]
    given = [f"model.path={published / 'qwen3-8b'}", "model.lora=null"]
    assert main([*words, "--check", *given]) == 2
    assert re.search(r"a rank needs (159|160)\.", capsys.readouterr().err)


@pytest.mark.parametrize("model", PUBLISHED)
@pytest.mark.parametrize("more", [(), ("eight_gpus",)])
def test_tiny_layer_leaves_agent_tasks_and_algorithm_as_they_are(
    model: str, more: tuple[str, ...], published: Path, here: Path
) -> None:
    path = [f"model.path={published / model}"]
    recipe = load(layers(model, "codex", *more), path)
    tiny = load(layers(model, "codex", *more, "tiny"), path)
    assert (tiny.algorithm, tiny.model) == (recipe.algorithm, recipe.model)
    assert tiny.data.harbor.train_dir == recipe.data.harbor.train_dir
    own, recipes = (
        each.remote_agent.model_dump(exclude={"grader", "timeout_s"}) for each in (tiny, recipe)
    )
    assert own == recipes
    assert plan_devices(tiny, [H100]) is None


@pytest.mark.parametrize(
    "part", [part for part in further(8) if RECIPE in part.program], ids=lambda part: part.name
)
def test_part_of_the_gpu_benchmark_is_a_recipe(part: Part, published: Path, here: Path) -> None:
    """The words are those of `train.sh`: files by name, then keys."""
    _, model, agent = part.program
    for words in (part.settings, [*part.settings, *part.rehearsed]):
        keys = [word for word in words if "=" in word]
        more = [word.removeprefix("--").replace("-", "_") for word in words if "=" not in word]
        config = load(layers(model, agent, *more), [f"model.path={published / model}", *keys])
        assert config.trainer.ranks == (4 if words == part.settings and part.gpus == 8 else 1)
        assert not config.data.harbor.val_dir


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_hidden_test_finds_the_fault_and_nothing_else(fault: Fault, tmp_path: Path) -> None:
    task = write_task(tmp_path, fault)
    repository = task / "environment/repository"

    def passes(module: str) -> bool:
        """As the verifier decides it; its folders are those of a sandbox."""
        runner = (task / "tests/run.py").read_text()
        runner = runner.replace('"/tests", "/app"', f'"{task / "tests"}", "{repository}"')
        command = [sys.executable, "-I", "-B", "-c", runner, module]
        return subprocess.run(command, capture_output=True, check=False).returncode == 7

    assert (passes("hidden_test"), passes("visible_test")) == (False, True)
    solution = (task / "solution" / fault.file).read_text()
    (repository / "shelf" / fault.file).write_text(solution)
    assert (passes("hidden_test"), passes("visible_test")) == (True, True)


def test_report_as_a_picture_is_named_in_the_task_and_seen_by_who_opens_it(tmp_path: Path) -> None:
    """`@` and the path, so that Claude Code opens it; nothing of the report is in a text."""
    for fault in FAULTS:
        task = write_task(tmp_path, fault, picture=True)
        instruction = (task / "instruction.md").read_text()
        assert "@/app/report.png\n" in instruction
        assert fault.report not in instruction
        with Image.open(task / "environment/repository/report.png") as picture:
            dark = np.asarray(picture.convert("L")) < 128
        assert dark.any()
        margins = (dark[:8], dark[-8:], dark[:, :8], dark[:, -8:])
        assert not any(each.any() for each in margins)  # no line is cut
        folder = write_task(tmp_path / "texts", fault)
        assert fault.report in (folder / "instruction.md").read_text()
        assert not list(folder.rglob("*.png"))


def run_script(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Runs the script where the programs that it starts print their arguments."""
    for path in ("examples/harbor", ".venv/bin"):
        (folder / path).mkdir(parents=True)
    (folder / RECIPES).symlink_to(ROOT / RECIPES)
    (folder / "examples/harbor/server.sh").write_text("harbor_server_url=http://here\n")
    for name in ("python", "agentic-train"):
        program = folder / ".venv/bin" / name
        program.write_text('#!/bin/bash\nprintf "%s\\n" "$@"\n')
        program.chmod(0o755)
    command = [str(RECIPES / "train.sh"), *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def test_tiny_layer_is_the_last_file_and_given_keys_are_the_last_keys(tmp_path: Path) -> None:
    words = ("qwen3-8b", "codex", "trainer.run_dir=mine", "--tiny", "--eight-gpus", "a=b")
    lines = run_script(tmp_path, *words).stdout.splitlines()
    files = [Path(line).stem for line in lines if line.endswith(".yaml")]
    assert files == ["swe", "qwen3-8b", "codex", "eight_gpus", "tiny"]
    assert lines[-2:] == ["trainer.run_dir=mine", "a=b"]
    assert "model.path=.cache/recipes/models/qwen3-8b" in lines
    assert lines[:4] == ["-m", "benchmarks.install", "recipes", "torchvision"]


def test_pictures_are_drawn_for_agents_that_look_at_them(tmp_path: Path) -> None:
    done = run_script(tmp_path, "qwen3-vl-4b", "claude-code", "--images", "--tiny")
    lines = done.stdout.splitlines()
    files = [Path(line).stem for line in lines if line.endswith(".yaml")]
    assert files == ["swe", "qwen3-vl-4b", "claude-code", "images", "tiny"]
    at = lines.index("examples.recipes.make_tasks")
    assert lines[at + 1 : at + 4] == ["--out", ".cache/recipes/pictures", "--pictures"]


def test_agent_that_cannot_look_at_pictures_is_refused(tmp_path: Path) -> None:
    done = run_script(tmp_path, "qwen3-vl-4b", "mini-swe-agent", "--images")
    assert done.returncode == 2
    assert "mini-swe-agent cannot look at the pictures of --images" in done.stderr


def test_published_model_needs_no_tiny_one(tmp_path: Path) -> None:
    assert "benchmarks.install" not in run_script(tmp_path, "qwen3-8b", "codex").stdout


@pytest.mark.parametrize("words", [(), ("qwen3-8b",), ("qwen3-8b", "none"), ("none", "codex")])
def test_script_names_the_file_that_is_not_there(words: tuple[str, ...], tmp_path: Path) -> None:
    done = run_script(tmp_path, *words)
    assert done.returncode == 2
    assert "there is no " in done.stderr
