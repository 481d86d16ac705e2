"""`agentic-train init DIR`: writes a project to train: configuration, tasks, agent and scorer.

Invariant: what is written passes `agentic-train --check` if the agent's program is installed, and
nothing that exists is overwritten. The files are copies of the examples, which the wheel contains.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from trainer.errors import ConfigError

CONFIG = "agentic_trainer.yaml"
_PACKAGES = Path(__file__).resolve().parents[2]
_INSTALLED = _PACKAGES / "agentic_rl_examples"
EXAMPLES = _INSTALLED if _INSTALLED.is_dir() else _PACKAGES / "examples"
_TASKS = ("train.jsonl", "heldout.jsonl")
_PACKAGE = re.compile(r"\((npm|PyPI): ([\w@./-]+)")
"""Where the first comment of an agent's file says from which index the agent comes."""

_TEMPLATE = """\
# {title}
#
#   agentic-train --config agentic_trainer.yaml
#
# `agentic-train --config agentic_trainer.yaml --check` prints every key with its value.
model:
  path: {model}
{model_keys}data:
  train_files: [train.jsonl]  # a task per line: {{"task_id": …, "prompt": …, any other field}}
  val_files: [heldout.jsonl]
remote_agent:
{agent}rollout:
  temperature: 1.0
  groups_per_step: 4
  group_size: 8
{concurrency}{limits}algorithm:
  mini_batches: 4
  groups: with_signal
  advantage: {{name: dr_grpo}}
  loss: {{name: ppo, clip_low: 0.2, clip_high: 0.28}}
  aggregation: token_mean
optimizer:
{optimizer}trainer:
  run_dir: runs/first
  steps: {steps}
"""
_SMALL_MODEL = {
    "model_keys": "",
    "optimizer": """\
  lr: 5.0e-4  # for this model of 0.7 M parameters; large models need about 1e-6
  betas: [0.9, 0.95]
  warmup_steps: 8
  schedule: linear
  min_lr_ratio: 0.1
""",
    "steps": 36,
}
_YOUR_MODEL = {
    "model_keys": "  compute_dtype: bfloat16\n",
    "optimizer": "  lr: 1.0e-6\n  warmup_steps: 4\n",
    "steps": 100,
}


@dataclass(frozen=True, slots=True)
class Project:
    """A kind of project, which `--agent` names.

    Example: Project("An agent on the OpenAI SDK.", "  python: …", EXAMPLES / "quickstart", (…,))
    """

    title: str
    agent: str
    """The text below `remote_agent`: the agent, its scorer and its time limit."""
    source: Path
    """The example that the files are copied from."""
    files: tuple[str, ...]
    has_model: bool = False
    """Whether the example's small model can do this agent's tasks."""
    install: str = ""
    """The command that installs the agent; empty if the project contains it."""
    concurrency: str = "  concurrency: 8\n"
    """The key of `rollout` for agents that are programs; empty: its default."""
    limits: str = ""
    """Further keys of `rollout` for the example's small model."""

    def config(self, model: Path | None) -> str:
        """The configuration, for a checkpoint of the user's or for the example's."""
        return _TEMPLATE.format(
            title=self.title,
            agent=self.agent,
            concurrency=self.concurrency,
            limits=self.limits if model is None else "",
            model="model" if model is None else model.absolute(),
            **(_SMALL_MODEL if model is None else _YOUR_MODEL),
        )


def kinds() -> dict[str, Project]:
    """Every kind of project, by its name."""
    shop, files = EXAMPLES / "quickstart", (*_TASKS, "agent.py", "shop.py", "verify.py")
    as_functions = """\
  # Each trial is a fork of a process that has imported the agent and its SDK once.
  python: {target: "agent.py:run"}
  grader: {target: "verify.py:grade"}
  # The parts of the wall that older Linux kernels lack; name none once the agent is not your own.
  sandbox: light without ports, processes, sockets
  timeout_s: 120
"""
    as_programs = """\
  # Each trial starts both programs; the environment names the model, its server and the task.
  command: {argv: ["{python}", "{root}/agent.py"]}
  verifier: {argv: ["{python}", "{root}/verify.py"]}
  # The parts of the wall that older Linux kernels lack; name none once the agent is not your own.
  sandbox: light without ports, processes, sockets
  timeout_s: 120
"""
    sdk = "A shop assistant on the OpenAI SDK learns to look up prices and add up an order."
    found = {
        "openai": Project(sdk, as_functions, shop, files, has_model=True, concurrency=""),
        "command": Project(sdk, as_programs, shop, files, has_model=True),
    }
    for file in sorted((EXAMPLES / "agents").glob("*.yaml")):
        found[file.stem.replace("_", "-")] = _third_party(file)
    return found | {"mini-swe-agent": _mini_swe_agent(found["mini-swe-agent"])}


def _mini_swe_agent(project: Project) -> Project:
    """With the short prompts of the example, which its small model can work with."""
    example = (project.source / CONFIG).read_text(encoding="utf-8")
    agent = example.partition("remote_agent:\n")[2].partition("rollout:\n")[0]
    agent = agent.replace("{root}/examples/mini_swe_agent/", "{root}/")
    return replace(
        project,
        agent=agent.replace("{root}/.agents/python/bin/mini", "mini"),
        files=(*project.files, "prompts.yaml"),
        has_model=True,
        limits="  max_tokens: 96\n",
    )


def _third_party(file: Path) -> Project:
    """An agent of `examples/agents` on small tasks in a shell."""
    comment, _, section = file.read_text(encoding="utf-8").partition("remote_agent:\n")
    title = comment.splitlines()[0].lstrip("# ")
    package = _PACKAGE.search(title)
    installers = {"npm": "npm install -g", "PyPI": "pip install"}
    agent = f"""{section}\
    template: "{{root}}/workspace"  # the working directory of each trial is a copy
  verifier: {{argv: ["{{python}}", "{{root}}/verify.py"]}}
  timeout_s: 600
"""
    return Project(
        title,
        agent,
        EXAMPLES / "mini_swe_agent",
        (*_TASKS, "shell_tasks.py", "verify.py", "workspace"),
        install=f"{installers[package[1]]} {package[2]}" if package else title,
    )


def init(folder: Path, agent: str, model: Path | None) -> list[str]:
    """Writes the project into a new folder; returns the lines for the user.

    Raises:
        ConfigError: the folder has files, the agent is unknown, or a model must be given.
    """
    known = kinds()
    if agent not in known:
        raise ConfigError(f"--agent {agent}: unknown; choose one of {', '.join(known)}")
    project = known[agent]
    if model is None and not project.has_model:
        small = ", ".join(name for name, each in known.items() if each.has_model)
        raise ConfigError(
            f"--model: missing; --agent {agent} needs the folder of a checkpoint that can use "
            f"tools, like --model /models/qwen3 (a small model comes with --agent {small})"
        )
    if model is not None and not (model / "config.json").is_file():
        raise ConfigError(
            f"--model {model}: has no config.json; give the folder of a Hugging Face checkpoint"
        )
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ConfigError(f"{folder}: exists and is not an empty folder; choose another name")
        _write(folder, project, model)
    except OSError as error:
        raise ConfigError(
            f"{folder}: cannot be written ({error.strerror or error}); choose a folder that is "
            "writable"
        ) from error
    lines = [f"{folder}: {', '.join(sorted(path.name for path in folder.iterdir()))}"]
    if project.install:
        lines.append(f"install the agent, so that it is on PATH: {project.install}")
    return [*lines, f"start the training: cd {folder} && agentic-train --config {CONFIG}"]


def _write(folder: Path, project: Project, model: Path | None) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in (*project.files, *(["model"] if model is None else [])):
        source = project.source / name
        if source.is_dir():
            shutil.copytree(source, folder / name)
        else:
            shutil.copyfile(source, folder / name)
    (folder / CONFIG).write_text(project.config(model), encoding="utf-8")


def main(arguments: argparse.Namespace) -> int:
    """Runs `agentic-train init`; returns its exit code."""
    try:
        lines = init(arguments.folder, arguments.agent, arguments.model)
    except ConfigError as error:
        print(f"agentic-train init: {error}", file=sys.stderr)
        return error.exit_code
    print("\n".join(lines))
    return 0
