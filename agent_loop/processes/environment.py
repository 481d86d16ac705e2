"""The environment variables that a trial's programs inherit, and placeholders in their settings.

Invariant: a variable of the trainer's environment reaches an agent, a verifier or a function only
if it is in the list below or named in `pass_env`. No secret reaches them by default, whatever its
name is.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import Field

from agent_loop.errors import LaunchError
from agent_loop.records import Trial
from proxy.machine.direct_hosts import with_direct_hosts
from proxy.settings.section import Section


class Variables(Section):
    """The key of the sections of agents and verifiers that are programs."""

    env: Mapping[str, str] = Field(default_factory=dict)
    """Additional environment variables; they replace those that every agent or verifier gets.
    Placeholders are replaced. GPUs are hidden from an agent of this machine unless this gives
    `CUDA_VISIBLE_DEVICES`, or `process.pass_env` names it."""


CERTIFICATES = frozenset(
    [
        "SSL_CERT_FILE",
        "SSL_CERT_DIR",
        "REQUESTS_CA_BUNDLE",
        "CURL_CA_BUNDLE",
        "NODE_EXTRA_CA_CERTS",
        "GIT_SSL_CAINFO",
        "PIP_CERT",
        "AWS_CA_BUNDLE",
    ]
)
"""Variables that name the files or folders of certificate authorities."""
_INHERITED_FOR = {
    "programs, the user and temporary files": (
        "PATH HOME USER LOGNAME SHELL HOSTNAME TMPDIR TMP TEMP LD_LIBRARY_PATH "
        "XDG_CACHE_HOME XDG_CONFIG_HOME XDG_DATA_HOME XDG_STATE_HOME XDG_RUNTIME_DIR"
    ),
    "language, time and terminal": "LANG LANGUAGE TZ TERM COLORTERM COLUMNS LINES NO_COLOR",
    "certificates": " ".join(sorted(CERTIFICATES)),
    "hosts that no proxy is used for": "NO_PROXY no_proxy",
    "a company's package index": "PIP_TRUSTED_HOST",
    "language runtimes": (
        "PYTHONPATH PYTHONUNBUFFERED PYTHONDONTWRITEBYTECODE PYTHONHASHSEED PYTHONIOENCODING "
        "PYTHONUTF8 VIRTUAL_ENV CONDA_PREFIX NODE_PATH NVM_DIR JAVA_HOME GOPATH GOROOT GOCACHE "
        "CARGO_HOME RUSTUP_HOME PLAYWRIGHT_BROWSERS_PATH"
    ),
    "folders of CUDA and of models": (
        "CUDA_HOME HF_HOME HF_HUB_CACHE HF_HUB_OFFLINE TRANSFORMERS_OFFLINE TIKTOKEN_CACHE_DIR "
        "TOKENIZERS_PARALLELISM"
    ),
}
_NOT_BEHIND_WALL = ("TMPDIR", "TMP", "TEMP", "XDG_RUNTIME_DIR")
GPUS = "CUDA_VISIBLE_DEVICES"
"""Which GPUs a program uses; empty: none."""
_INHERITED = frozenset(" ".join(_INHERITED_FOR.values()).split())
_INHERITED_PREFIXES = ("LC_", "OMP_", "OPENBLAS_", "MKL_", "NUMEXPR_")
"""Prefixes of the variables for the locale and for the number of threads."""
_URLS = frozenset(
    [
        "http_proxy",
        "https_proxy",
        "all_proxy",
        "pip_index_url",
        "pip_extra_index_url",
        "uv_index_url",
        "uv_default_index",
        "uv_index",
        "npm_config_registry",
        "goproxy",
        "hf_endpoint",
    ]
)
"""Names of variables with URLs, in lower case; inherited unless the URL contains a user or a
password."""

_PLACEHOLDER = re.compile(r"\{(task\.)?([a-z_]+)\}")


def inherited_environment(pass_env: Sequence[str] = ()) -> dict[str, str]:
    """The variables of this process that are in the list above or named in `pass_env`. A name that
    is not set is left out. GPUs are hidden, because the trainer and its engines have planned all of
    their memory, unless `pass_env` names their variable. Where an HTTP proxy is among them, none is
    used for this machine."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name in pass_env or _is_inherited(name, value)
    }
    return with_direct_hosts(inherited if GPUS in pass_env else inherited | {GPUS: ""})


def own_home() -> Path:
    """The path of the home folder behind a wall: the user's, unless that is the root."""
    home = Path.home()
    return home if home != Path("/") else Path("/home/agent")


def behind_wall(env: Mapping[str, str]) -> dict[str, str]:
    """The environment without the variables that name folders which do not exist behind a wall:
    those for temporary files, and of the user outside of the home folder."""
    home = own_home()
    kept = {name: value for name, value in env.items() if name not in _NOT_BEHIND_WALL}
    outside = [
        name
        for name, value in kept.items()
        if name.startswith("XDG_") and not Path(value).is_relative_to(home)
    ]
    return {name: value for name, value in kept.items() if name not in outside} | {
        "HOME": str(home)
    }


def expand(template: str, trial: Trial) -> str:
    """Replaces `{prompt}`, `{model}`, `{base_url}`, `{api_key}`, `{trial_id}`, `{seed}`,
    `{workspace}`, `{directory}`, `{task_file}`, `{task_id}`, `{task.FIELD}` (a field of the task's
    data), `{root}` (the folder in which this process was started) and `{python}` (its interpreter).
    Any other braces stay as they are.

    Raises:
        LaunchError: `{task.FIELD}` names a field that the task does not have.
    """
    known = {
        "prompt": trial.task.prompt,
        "model": trial.model,
        "base_url": trial.base_url,
        "api_key": trial.api_key,
        "trial_id": trial.trial_id,
        "seed": trial.seed,
        "workspace": trial.workspace.absolute(),
        "directory": trial.agent_directory.absolute(),
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
                f"{template!r}: task {trial.task.task_id!r} has no field {name!r}; "
                f"its fields are {sorted(trial.task.data)}"
            )
        return str(trial.task.data[name])

    return _PLACEHOLDER.sub(value, template)


def _is_inherited(name: str, value: str) -> bool:
    if name.lower() in _URLS:
        return "@" not in value
    return name in _INHERITED or name.startswith(_INHERITED_PREFIXES)
