"""What an agent is told, for every family of agents, and the trial's directory it works in.

Invariant: an agent sees its own session's key and no other: our admin key and the user's own API
keys are removed from what it inherits.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import orjson

from agent_loop.errors import LaunchError
from agent_loop.launchers.protocol import Trial

GIT = "git+"
GIT_TIMEOUT_S = 600.0
"""For a clone over a slow line; it is not part of the agent's time."""

PROMPT_BYTES = 128_000
"""Linux allows 131,072 bytes per environment string; longer prompts are in TASK_FILE alone."""

_SECRET = re.compile(r"^AGENTIC_|(^|_)(KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS|DSN)(_|$)")
"""Names of what agents do not inherit: our own settings, and the user's keys. An agent that needs
one is given it in its launcher's `env`."""

_PLACEHOLDER = re.compile(r"\{(task\.)?([a-z_]+)\}")


def prompt_of(data: Mapping[str, object]) -> str:
    """The task in words: its `prompt`, `instruction` or `question`."""
    for name in ("prompt", "instruction", "question"):
        if isinstance(value := data.get(name), str):
            return value
    return ""


def inherited_environment() -> dict[str, str]:
    """Ours without secrets."""
    return {name: value for name, value in os.environ.items() if not _SECRET.search(name)}


def agent_environment(trial: Trial, extra: Mapping[str, str]) -> dict[str, str]:
    """What is inherited, then what the agent families read, then `extra` (templates)."""
    env = inherited_environment()
    root = trial.base_url.removesuffix("/v1")
    env |= {
        "OPENAI_BASE_URL": trial.base_url,
        "OPENAI_API_BASE": trial.base_url,
        "OPENAI_API_KEY": trial.api_key,
        "ANTHROPIC_BASE_URL": root,
        "ANTHROPIC_API_KEY": trial.api_key,
        "AGENT_MODEL": trial.model,
        "OPENAI_MODEL": trial.model,
        "ANTHROPIC_MODEL": trial.model,
        "AGENT_SEED": str(trial.seed),
        "PWD": str(trial.workspace.absolute()),  # some agents believe it rather than ask
        "TASK_FILE": str(trial.task_file.absolute()),
    }
    prompt = prompt_of(trial.task.data)
    if len(prompt.encode()) <= PROMPT_BYTES:
        env["TASK_PROMPT"] = prompt
    return env | {name: expand(value, trial) for name, value in extra.items()}


def expand(template: str, trial: Trial) -> str:
    """Replaces `{prompt}`, `{model}`, `{base_url}`, `{api_key}`, `{trial_id}`, `{seed}`,
    `{workspace}`, `{directory}`, `{task_file}`, `{task_id}`, `{task.FIELD}` (a field of the task's
    data), `{root}` (where this process was started) and `{python}` (its interpreter). Any other
    braces stay as they are.

    Raises:
        LaunchError: `{task.FIELD}` names a field that the task does not have.
    """
    known = {
        "prompt": prompt_of(trial.task.data),
        "model": trial.model,
        "base_url": trial.base_url,
        "api_key": trial.api_key,
        "trial_id": trial.trial_id,
        "seed": trial.seed,
        "workspace": trial.workspace.absolute(),
        "directory": trial.directory.absolute(),
        "task_file": trial.task_file.absolute(),
        "task_id": trial.task.task_id,
        "root": Path.cwd(),
        "python": sys.executable,
    }

    def value(match: re.Match[str]) -> str:
        of_task, name = match.groups()
        if not of_task:
            return str(known.get(name, match.group(0)))
        if name not in trial.task.data:
            raise LaunchError(
                f"{template!r}: task {trial.task.task_id!r} has no {name!r}; "
                f"it has {sorted(trial.task.data)}"
            )
        return str(trial.task.data[name])

    return _PLACEHOLDER.sub(value, template)


def make_workspace(trial: Trial, template: str | None) -> None:
    """Writes the task file and makes the working directory: empty, a copy of the template
    folder, or a checkout (`git+REPOSITORY#REVISION`).

    Raises:
        LaunchError: there is no such folder or revision, or the disk refuses.
    """
    trial.task_file.write_bytes(orjson.dumps(dict(trial.task.data), default=str))
    try:
        if template is None:
            trial.workspace.mkdir()
        elif template.startswith(GIT):
            _checkout(expand(template, trial), trial.workspace)
        else:
            source = Path(expand(template, trial))
            shutil.copytree(source, trial.workspace, symlinks=True)
    except (OSError, shutil.Error) as error:
        raise LaunchError(f"cannot make the working directory {trial.workspace}: {error}") from None


def _checkout(source: str, folder: Path) -> None:
    repository, _, revision = source.removeprefix(GIT).partition("#")
    for command in (
        ["clone", "--quiet", "--no-checkout", "--", repository, str(folder)],
        ["-C", str(folder), "checkout", "--quiet", "--detach", revision or "HEAD", "--"],
    ):
        try:
            subprocess.run(
                ["git", *command],
                check=True,
                capture_output=True,
                text=True,
                timeout=GIT_TIMEOUT_S,
                stdin=subprocess.DEVNULL,
            )
        except subprocess.CalledProcessError as error:
            raise LaunchError(f"cannot check out {source!r}: {error.stderr.strip()}") from None
        except subprocess.TimeoutExpired:
            raise LaunchError(
                f"cannot check out {source!r}: not done in {GIT_TIMEOUT_S:.0f} s"
            ) from None
