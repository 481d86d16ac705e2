"""The instructions of a task's Dockerfile that a sandbox can execute itself, in the file's order.

Invariant: an instruction that changes the environment is executed or refused by name, never
ignored. `FROM` is the exception: the sandbox uses this machine's own `/` instead of the image.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from harbor_sdk.sandbox import DEFAULT_PATH

# These say how an image is started or described. Harbor starts its own commands.
_NO_EFFECT = frozenset({"FROM", "CMD", "ENTRYPOINT", "EXPOSE", "LABEL", "MAINTAINER", "STOPSIGNAL"})
_EXECUTED = ("RUN", "ENV", "WORKDIR", "COPY")


class DockerfileError(ValueError):
    """An instruction needs a real image build. The message names its line."""


@dataclass(frozen=True, slots=True)
class Run:
    """A shell command, with its working directory and variables."""

    command: str
    workdir: str
    env: dict[str, str]


@dataclass(frozen=True, slots=True)
class Copy:
    """Files to copy to `target`. `is_dir`: they go into that folder."""

    sources: tuple[str, ...]
    """Relative to the task's `environment/`."""
    target: str
    is_dir: bool


@dataclass(frozen=True, slots=True)
class Build:
    """The `steps` in their order. `workdir` and `env` apply to every later command."""

    steps: tuple[Run | Copy, ...] = ()
    workdir: str = "/"
    env: tuple[tuple[str, str], ...] = ()


def read_dockerfile(path: Path) -> Build:
    """Raises `DockerfileError` if an instruction needs an image build (stages, ARG, USER, ADD,
    …)."""
    workdir, env, steps, stages = "/", dict[str, str](), list[Run | Copy](), 0
    for line, keyword, rest in _instructions(path.read_text(encoding="utf-8")):
        if keyword == "FROM":
            stages += 1
        if stages > 1:
            raise DockerfileError(
                f"{path}:{line}: a second FROM needs an image build: use the environment docker"
            )
        if keyword == "WORKDIR":
            workdir = str(PurePosixPath(workdir, _expand(rest, env)))
            steps.append(Run(f"mkdir -p {shlex.quote(workdir)}", "/", {}))
        elif keyword == "ENV":
            env.update(_pairs(_expand(rest, env)))
        elif keyword == "RUN":
            steps.append(Run(_shell(rest), workdir, dict(env)))
        elif keyword == "COPY" and not rest.startswith("--"):
            steps.append(_copy(_expand(rest, env), workdir))
        elif keyword not in _NO_EFFECT:
            raise DockerfileError(
                f"{path}:{line}: a local sandbox executes {', '.join(_EXECUTED)} (without "
                f"options), not {keyword} {rest[:60]!r}: use the environment docker, or set "
                "run_dockerfile=false and prepare this machine"
            )
    return Build(tuple(steps), workdir, tuple(env.items()))


def source_path(folder: Path, source: str) -> Path:
    """The file or folder that a COPY names, in the task's `environment/`, which is its `/`. Raises
    `DockerfileError` if it is outside, where the task's solution and files of this machine are."""
    path = folder / source.lstrip("/")
    if not path.resolve().is_relative_to(folder.resolve()):
        raise DockerfileError(
            f"COPY {source!r} is outside {folder}: only files of a task's environment/ are copied"
        )
    return path


def _instructions(text: str) -> list[tuple[int, str, str]]:
    """`(line number, KEYWORD, rest)`, with continuation lines joined and comments removed."""
    found: list[tuple[int, str, str]] = []
    open_line, start = "", 0
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.strip()
        if not line or line.startswith("#"):
            continue
        start = start or number
        open_line += line
        if open_line.endswith("\\"):
            open_line = open_line[:-1]
            continue
        keyword, _, rest = open_line.partition(" ")
        found.append((start, keyword.upper(), rest.strip()))
        open_line, start = "", 0
    return found


def _shell(rest: str) -> str:
    if rest.startswith("["):
        return shlex.join(json.loads(rest))
    if rest.startswith("--") or "<<" in rest.split("\n", 1)[0]:
        raise DockerfileError(
            f"RUN with options or a here-document: use the environment docker: {rest[:60]!r}"
        )
    return rest


def _pairs(rest: str) -> list[tuple[str, str]]:
    words = shlex.split(rest)
    if words and "=" not in words[0]:
        return [(words[0], " ".join(words[1:]))]
    return [(key, value) for key, _, value in (word.partition("=") for word in words)]


def _copy(rest: str, workdir: str) -> Copy:
    words: Sequence[str] = json.loads(rest) if rest.startswith("[") else shlex.split(rest)
    *sources, target = words
    is_dir = target.endswith("/") or target in (".", "./") or len(sources) > 1
    return Copy(tuple(sources), str(PurePosixPath(workdir, target)), is_dir)


def _expand(text: str, env: dict[str, str]) -> str:
    known = {"PATH": DEFAULT_PATH, **env}
    return re.sub(r"\$\{?(\w+)\}?", lambda match: known.get(match[1], match[0]), text)
