"""`agentic-proxy doctor`: what is wrong with an installation, a key, a store, a proxy, its engines.

It changes nothing and starts nothing. Each finding is a line: `ok`, `note` (something that can be
meant so) or `fault`, with what to do. The exit code is 1 if there is a fault.
"""

from __future__ import annotations

import asyncio
import os
import platform
import shutil
import stat
import subprocess
from argparse import Namespace
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Literal

import aiohttp

from proxy import wall
from proxy.admin_key import configured_key, key_file
from proxy.client import ProxyClient, ProxyClientError, UntrustedProxy
from proxy.commands.agent_environment import known_agents
from proxy.config import ProxyConfig, load_config
from proxy.engines import vllm_platform
from proxy.errors import ConfigurationError, StoreError
from proxy.machine.direct_hosts import proxy_for
from proxy.machine.port import http_url
from proxy.machine.secrecy import without_password
from proxy.settings.hub import model_folder
from proxy.store import open_store
from proxy.store.protocol import SessionFilter

WAIT_S = 5.0
LITTLE_BYTES = 2**30
"""Free space of a disk below which the record is in danger."""
GIT_WAIT_S = 10.0
ANY_PROGRAMS = frozenset({"sh", "unshare"})
"""Programs that start an agent, and much else."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Example: Finding("fault", "store", "the file a.db does not exist")"""

    grade: Literal["ok", "note", "fault"]
    about: str
    text: str

    def __str__(self) -> str:
        return f"{self.grade:<6} {self.about}: {self.text}"


def doctor(arguments: Namespace) -> int:
    """Prints what is found. Returns 1 if something is wrong."""
    return asyncio.run(_print(arguments))


async def _print(arguments: Namespace) -> int:
    worst = 0
    async for finding in findings(arguments):
        print(finding, flush=True)
        worst |= finding.grade == "fault"
    return worst


async def findings(arguments: Namespace) -> AsyncIterator[Finding]:
    """Everything that is found, in the order in which one thing needs the other."""
    for each in _installation():
        yield each
    given = {
        name: value
        for name in ("store", "model")
        if (value := getattr(arguments, name)) is not None
    }
    try:
        config = load_config(arguments.config, **given)
    except ConfigurationError as error:
        yield Finding("fault", "configuration", error.message)
        return
    yield Finding("ok", "configuration", str(arguments.config or "defaults and the environment"))
    for each in _model(config):
        yield each
    for each in _key(config):
        yield each
    async for each in _store(config):
        yield each
    url = arguments.url or config.public_url or http_url(config.host, config.port)
    async for each in _proxy(config, url):
        yield each
    for engine in arguments.engine or ():
        yield await _engine(engine)
    for each in _agents():
        yield each


def _installation() -> Iterator[Finding]:
    python = f"agentic-rl {version('agentic-rl')}, Python {platform.python_version()}"
    yield Finding("ok", "installation", f"{python}, {platform.system()} {platform.release()}")
    try:
        yield Finding("ok", "vLLM", vllm_platform.version())
    except ConfigurationError as error:
        yield Finding("note", "vLLM", error.message)
    try:
        lacks = wall.missing()
    except OSError as error:
        lacks = str(error)
    if lacks is None:
        yield Finding("ok", "wall", "`agentic-proxy run` can hide files and processes from agents")
    else:
        yield Finding("note", "wall", f"{lacks}; `run --sandbox off` runs agents without it")


def _model(config: ProxyConfig) -> Iterator[Finding]:
    if config.model is None:
        yield Finding(
            "note", "model", "none is set; `serve` needs --model FOLDER or --upstream URL"
        )
        return
    try:
        folder = model_folder(config.model)
    except ConfigurationError as error:
        yield Finding("fault", "model", error.message)
        return
    needed = ("config.json", "tokenizer_config.json")
    lacking = [name for name in needed if not (folder / name).is_file()]
    if lacking:
        yield Finding("fault", "model", f"{folder} has no {' and no '.join(lacking)}")
    else:
        yield Finding("ok", "model", str(folder))


def _key(config: ProxyConfig) -> Iterator[Finding]:
    if config.admin_key is not None:
        yield Finding("ok", "admin key", "given by the configuration or the environment")
        return
    file = key_file(config)
    if not file.exists():
        yield Finding("note", "admin key", f"{file} does not exist; `serve` creates it")
        return
    try:
        mode, text = stat.S_IMODE(file.stat().st_mode), file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        yield Finding("fault", "admin key", f"{file} cannot be read ({error})")
        return
    if not text.strip():
        yield Finding("fault", "admin key", f"{file} is empty; remove it, or write a key")
    elif mode & 0o077:
        yield Finding("fault", "admin key", f"others can read {file}; run: chmod 600 {file}")
    else:
        yield Finding("ok", "admin key", str(file))
    yield from _in_repository("admin key", file)


async def _store(config: ProxyConfig) -> AsyncIterator[Finding]:
    name = without_password(config.store_url)
    file = Path(config.store_url.removeprefix("sqlite:///"))
    is_file = config.store_url.startswith("sqlite:")
    if is_file and not file.exists():
        yield Finding("note", "store", f"{name} does not exist; `serve` creates it")
    else:
        try:
            store = await open_store(config.store_url, create=False)
            try:
                found = await store.list_sessions(SessionFilter(limit=1))
            finally:
                await store.close()
        except (ConfigurationError, StoreError) as error:
            yield Finding("fault", "store", str(error))
            return
        some = "has sessions" if found else "has no session yet"
        yield Finding("ok", "store", f"{name} {some}")
    if is_file:
        folder = next(each for each in file.absolute().parents if each.is_dir())
        free = shutil.disk_usage(folder).free
        if free < LITTLE_BYTES:
            left = f"{free / 2**20:.0f} MiB are free in {folder}"
            yield Finding("fault", "disk", f"{left}; a proxy refuses calls that it cannot record")
        for each in _in_repository("store", file):
            yield each


async def _proxy(config: ProxyConfig, url: str) -> AsyncIterator[Finding]:
    async with ProxyClient(url, configured_key(config, url), timeout_s=WAIT_S) as client:
        try:
            await client.health()
        except ProxyClientError as error:
            if isinstance(error, UntrustedProxy):
                yield Finding("fault", "proxy", str(error))
            elif error.status:
                yield Finding("fault", "proxy", f"what answers at {url} is not a proxy: {error}")
            else:
                start = "start one with `agentic-proxy serve --model FOLDER`"
                yield Finding("note", "proxy", f"none answers at {url}; {start}")
            return
        yield Finding("ok", "proxy", url)
        try:
            engines = await client.engines()
        except ProxyClientError as error:
            if error.status == 403:  # a person's key, which is valid
                yield Finding("note", "engines", f"not shown: {error}")
            else:
                yield Finding("fault", "proxy", f"it refuses the key: {error}")
            return
    if not engines:
        yield Finding("fault", "engines", f"{url} has none; see the log of the proxy")
    for engine in engines:
        about = f"engine {engine['name']}"
        if engine["healthy"]:
            context = engine["max_context_tokens"]
            size = "" if context is None else f", context of {context} tokens"
            yield Finding("ok", about, f"{engine['url']}{size}")
            if engine["text_only"]:
                text = "it returns text, not tokens: for evaluation and SFT, not for RL"
                yield Finding("note", about, text)
        else:
            yield Finding("fault", about, f"{engine['url']} does not answer; read its log")


async def _engine(url: str) -> Finding:
    timeout = aiohttp.ClientTimeout(total=WAIT_S)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout, proxy=proxy_for(url)) as http,
            http.get(f"{url.rstrip('/')}/health") as answer,
        ):
            if answer.status == 200:
                return Finding("ok", "engine", without_password(url))
            text = f"{without_password(url)} answers {answer.status} to GET /health"
            return Finding("fault", "engine", text)
    except (aiohttp.ClientError, ConfigurationError, TimeoutError, ValueError) as error:
        reason = str(error) or type(error).__name__
        return Finding("fault", "engine", f"{without_password(url)} does not answer: {reason}")


def _agents() -> Iterator[Finding]:
    programs = {agent.program for agent in known_agents().values()} - ANY_PROGRAMS
    found = sorted(program for program in programs if shutil.which(program))
    names = ", ".join(found) if found else "none of those with settings of their own is on PATH"
    yield Finding("ok" if found else "note", "agents", names)


def _in_repository(about: str, file: Path) -> Iterator[Finding]:
    """A fault if git has the file, a note if it would add it."""
    if shutil.which("git") is None or not file.exists():
        return

    def git(*words: str) -> int:
        command = ["git", "-C", str(file.absolute().parent), *words, "--", file.name]
        environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
        done = subprocess.run(
            command, capture_output=True, check=False, timeout=GIT_WAIT_S, env=environment
        )
        return done.returncode

    if git("ls-files", "--error-unmatch") == 0:
        yield Finding("fault", about, f"git has {file}: git rm --cached {file}, and ignore it")
    elif git("check-ignore", "-q") == 1:
        yield Finding("note", about, f"{file} lies in a repository that does not ignore it")
