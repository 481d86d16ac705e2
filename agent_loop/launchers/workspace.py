"""What every agent gets: environment variables, a working directory and a task file.

Invariant: an agent gets the key of its own session and no other key.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import orjson

from agent_loop.errors import LaunchError
from agent_loop.processes.environment import expand, inherited_environment
from agent_loop.records import Trial
from agent_loop.threads import run_to_end

GIT = "git+"
GIT_TIMEOUT_S = 600.0
"""Seconds for a checkout, enough for a clone over a slow network; not part of the agent's time."""

PROMPT_BYTES = 128_000
"""Maximum size of TASK_PROMPT, because Linux allows 131,072 bytes per environment string; a longer
prompt is in TASK_FILE only."""


def agent_environment(
    trial: Trial, extra: Mapping[str, str], pass_env: Sequence[str] = ()
) -> dict[str, str]:
    """The inherited variables and those named in `pass_env`, then the trial's, then `extra` with
    its placeholders replaced; later values replace earlier ones."""
    env = inherited_environment(pass_env)
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
        "PWD": str(trial.workspace.absolute()),  # some agents read it instead of calling getcwd
        "TASK_FILE": str(trial.task_file.absolute()),
    }
    if len(trial.task.prompt.encode()) <= PROMPT_BYTES:
        env["TASK_PROMPT"] = trial.task.prompt
    return env | {name: expand(value, trial) for name, value in extra.items()}


async def make_workspace(trial: Trial, template: str | None) -> None:
    """Writes the task file, and makes the agent's directory and the working directory: an empty
    one, a copy of the template folder, or a checkout (`git+REPOSITORY#REVISION`).

    Raises:
        LaunchError: the folder or revision does not exist, or a file cannot be written.
    """
    await run_to_end(_make_workspace, trial, template)


def _make_workspace(trial: Trial, template: str | None) -> None:
    trial.task_file.write_bytes(orjson.dumps(trial.agent_data, default=str))
    try:
        trial.agent_directory.mkdir()
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
        # With hard links an agent could change the objects of the repository that is cloned.
        ["clone", "--quiet", "--no-checkout", "--no-hardlinks", "--", repository, str(folder)],
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
                f"cannot check out {source!r}: not finished after {GIT_TIMEOUT_S:.0f} s"
            ) from None
