"""The part of a task's Dockerfile that a sandbox can carry out itself, in the file's order.

Invariant: an instruction that changes the environment is carried out or refused by name, never
passed over in silence. `FROM` is the exception: this machine's own `/` stands in for the image.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from harbor_sdk.sandbox import DEFAULT_PATH

# They say how an image is started or described: Harbor starts its own commands.
_NO_EFFECT = frozenset({"FROM", "CMD", "ENTRYPOINT", "EXPOSE", "LABEL", "MAINTAINER", "STOPSIGNAL"})
_CARRIED_OUT = ("RUN", "ENV", "WORKDIR", "COPY")


class DockerfileError(ValueError):
    """An instruction that needs a real image build; the message has its line."""


@dataclass(frozen=True, slots=True)
class Run:
    command: str
    workdir: str
    env: dict[str, str]


@dataclass(frozen=True, slots=True)
class Copy:
    sources: tuple[str, ...]
    """Relative to the task's `environment/`."""
    target: str
    is_dir: bool


@dataclass(frozen=True, slots=True)
class Build:
    """`steps` in order; `workdir` and `env` hold for every later command."""

    steps: tuple[Run | Copy, ...] = ()
    workdir: str = "/"
    env: tuple[tuple[str, str], ...] = ()


def read_dockerfile(path: Path) -> Build:
    """Raises `DockerfileError` for what only an image build can do (stages, ARG, USER, ADD, …)."""
    workdir, env, steps, stages = "/", dict[str, str](), list[Run | Copy](), 0
    for line, keyword, rest in _instructions(path.read_text()):
        if keyword == "FROM":
            stages += 1
        if stages > 1:
            raise DockerfileError(f"{path}:{line}: a second FROM needs an image build: use docker")
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
                f"{path}:{line}: a local sandbox carries out {', '.join(_CARRIED_OUT)} (without "
                f"options), not {keyword} {rest[:60]!r}: use docker, or set run_dockerfile=false "
                "and prepare this machine"
            )
    return Build(tuple(steps), workdir, tuple(env.items()))


def _instructions(text: str) -> list[tuple[int, str, str]]:
    """`(line number, KEYWORD, rest)`, continuation lines joined, comments dropped."""
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
        raise DockerfileError(f"RUN with options or a here-document needs docker: {rest[:60]!r}")
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
