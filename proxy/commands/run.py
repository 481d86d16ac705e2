"""`agentic-proxy run -- PROGRAM …`: an agent in a recorded session, with one command.

It finds a running proxy or starts one, creates a session, and runs the program with the variables
that this agent needs. Without a program it prints the lines to paste into a shell.
Invariant: when the command ends, also by Ctrl-C, the agent has ended, its session is completed, and
a proxy that it started has stopped.
"""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import subprocess
import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

from proxy.admin_key import configured_key, key_file
from proxy.client import ProxyClient, ProxyClientError, SessionHandle, UntrustedProxy
from proxy.commands.agent_environment import (
    agent_environment,
    find_agent,
    placeholders,
    session_variables,
)
from proxy.commands.foreground import run_agent
from proxy.commands.notes import noted
from proxy.commands.sessions import options, tags
from proxy.commands.terminal import one_line
from proxy.config import ProxyConfig, load_config
from proxy.errors import ConfigurationError, StoreError
from proxy.extra_registry import FOLDER_NOTES
from proxy.machine.port import http_url
from proxy.machine.swept_folder import swept_folder
from proxy.records import FOLDER, GIT_BRANCH, REFUSED, BranchMode, Origin
from proxy.settings.late_section import load_extra
from proxy.settings.state_folder import state_folder
from proxy.store import open_store

FIND_TIMEOUT_S = 5.0
"""Seconds in which a running proxy answers /health."""
GIT_TIMEOUT_S = 5.0
_LISTENS = re.compile(r"recording proxy on (\S+), ")


def run(arguments: Namespace) -> int:
    """Returns the exit code of the agent."""
    argv: list[str] = arguments.program
    config = configuration(arguments)
    if not argv:
        with running(arguments, config, may_start=False) as client:
            print(asyncio.run(_lines(client, arguments)))
        return 0
    agent = find_agent(argv, arguments.agent).at_home(isolated=arguments.isolated)
    with (
        running(arguments, config, may_start=True) as client,
        swept_folder("agentic-proxy-run-") as directory,
    ):
        session = asyncio.run(_open(client, arguments, agent.name))
        agent.write_files(placeholders(session, directory))
        try:
            code = run_agent(
                agent.command(argv, placeholders(session, directory)),
                agent_environment(agent, session, directory),
                [str(path) for path in (*private_files(config), *arguments.hide)],
                walled=arguments.sandbox == "light",
            )
        finally:
            said = noted(directory)
            here = asyncio.run(_is_here(config, session.trial_id))
            next_ones = (
                _commands(session.trial_id, options(arguments))
                if here
                else _remote_commands(session.trial_id, client.base_url, arguments.config)
            )
            print(asyncio.run(_closed(client, session.trial_id, said, next_ones)), file=sys.stderr)
    return 128 - code if code < 0 else code


async def _open(
    client: ProxyClient, arguments: Namespace, agent: str | None = None
) -> SessionHandle:
    metadata = {**tags(arguments.tag), **({"agent": agent} if agent else {})}
    metadata[FOLDER] = os.getcwd()
    if branch := git_branch():
        metadata[GIT_BRANCH] = branch
    if FOLDER_NOTES is not None:
        metadata = {**load_extra(FOLDER_NOTES)(Path.cwd()), **metadata}
    async with client:
        try:
            if (origin := origin_of(arguments)) is not None:
                return await client.branch(origin, arguments.session, metadata=metadata)
            return await client.create_session(arguments.session, metadata=metadata)
        except ProxyClientError as error:
            if error.status == 409 and "already exists" in str(error):
                raise ConfigurationError(
                    f"--session {arguments.session}: exists; choose another name"
                ) from error
            raise ConfigurationError(str(error)) from error


def git_branch() -> str:
    """The branch that is checked out in the working folder; empty: none is, or there is no Git."""
    command = ["git", "symbolic-ref", "--short", "--quiet", "HEAD"]
    try:
        found = subprocess.run(
            command, capture_output=True, encoding="utf-8", timeout=GIT_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired, UnicodeDecodeError):
        return ""
    return found.stdout.strip()


def origin_of(arguments: Namespace) -> Origin | None:
    """The recorded turns with which the session begins, if the arguments name them.

    Raises:
        ConfigurationError: only one of --from and --turn is given, or the file cannot be read.
    """
    if (arguments.origin is None) != (arguments.turn is None):
        raise ConfigurationError("--from SESSION and --turn K belong together; give both")
    if arguments.origin is None:
        return None
    try:
        answer = None if arguments.answer is None else arguments.answer.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"--answer {arguments.answer}: {error}") from error
    mode = BranchMode.LIVE if arguments.live else BranchMode.STRICT
    return Origin(arguments.origin, arguments.turn, mode, system=arguments.edit, answer=answer)


async def _is_here(config: ProxyConfig, trial_id: str) -> bool:
    """Whether the store that other commands read by themselves has the session."""
    try:
        store = await open_store(config.store_url, create=False)
    except (ConfigurationError, StoreError):
        return False
    try:
        return await store.get_session(trial_id) is not None
    finally:
        await store.close()


def _commands(trial_id: str, where: str) -> str:
    word = shlex.quote(trial_id)
    return (
        f"  agentic-proxy sessions show {word}{where}\n"
        f"  agentic-proxy export {word} --format messages --out session.jsonl{where}"
    )


def _remote_commands(trial_id: str, url: str, file: Path | None) -> str:
    """What shows and exports a session of a proxy whose store is out of reach."""
    config = "" if file is None else f" --config {shlex.quote(str(file))}"
    commands = _commands(trial_id, f"{config} --url {shlex.quote(url)}")
    return f"{commands}\n  {url}/#/trial/{quote(trial_id, safe='')}"


async def _closed(
    client: ProxyClient, trial_id: str, said: Sequence[dict[str, Any]], next_ones: str
) -> str:
    """Completes the session, and keeps what was said of it; returns its summary."""
    async with client:
        try:
            await client.complete(trial_id)
            unkept = [await _kept(client, trial_id, each) for each in said]
            refused = [event async for event in client.events(trial_id) if event["kind"] == REFUSED]
            summary = _summary(await client.show(trial_id), refused, next_ones)
            return "\n".join([*filter(None, unkept), summary])
        except ProxyClientError as error:
            return f"session {trial_id}: {error}"


async def _kept(client: ProxyClient, trial_id: str, said: dict[str, Any]) -> str:
    """Keeps a note of the agent's session; returns why it cannot be kept, if it cannot."""
    known = {name: said[name] for name in ("value", "comment", "tags") if name in said}
    try:
        await client.curate(trial_id, **known)
    except (ProxyClientError, TypeError, ValueError) as error:
        return f"a note of the session is not kept: {one_line(str(error))[:500]}"
    return ""


def _summary(session: dict[str, Any], refused: Sequence[dict[str, Any]], next_ones: str) -> str:
    name, turns = session["trial_id"], session["turns"]
    causes = Counter(turn["fork_cause"] for turn in turns if turn["fork_cause"])
    forks = ", ".join(f"{count} {cause}" for cause, count in causes.items()) or "none"
    prompt = sum(turn["new_prompt_tokens"] for turn in turns)
    sampled = sum(turn["sampled_tokens"] for turn in turns)
    why = [f"  refused with {each['status']}: {one_line(each['message'])}\n" for each in refused]
    more = f"  and {len(why) - 1} calls before it\n" if why[1:] else ""
    return (
        f"session {name}: {len(turns)} turns, {prompt} prompt tokens, {sampled} sampled tokens,"
        f" forks: {forks}\n"
        f"{''.join(why[-1:])}{more}"
        f"{next_ones}"
    )


async def _lines(client: ProxyClient, arguments: Namespace) -> str:
    """A new session's variables as lines for a shell."""
    session = await _open(client, arguments)
    variables = session_variables(session)
    posix = " ".join(f"{name}={shlex.quote(value)}" for name, value in variables.items())
    fish = [f"set -gx {name} {shlex.quote(value)}" for name, value in variables.items()]
    return "\n".join(
        [f"# session {session.trial_id}; bash, zsh, sh:", f"export {posix}", "# fish:", *fish]
    )


@contextmanager
def running(arguments: Namespace, config: ProxyConfig, *, may_start: bool) -> Iterator[ProxyClient]:
    """A client of the proxy that answers at the configured address, or of one that is started and
    stopped."""
    url = arguments.url or config.public_url or http_url(config.host, config.port)
    found = ProxyClient(url, configured_key(config, url), timeout_s=FIND_TIMEOUT_S)
    if asyncio.run(_answers(found)):
        yield ProxyClient(url, found.admin_key)
        return
    if not may_start or arguments.url is not None or config.model is None:
        raise ConfigurationError(
            f"no proxy answers at {url}; start one with `agentic-proxy serve --model FOLDER`"
            + (", or give --model FOLDER here, which starts one" if may_start else "")
        )
    with _served(arguments) as url:
        yield ProxyClient(url, configured_key(config, url))


async def _answers(client: ProxyClient) -> bool:
    async with client:
        try:
            await client.health()
        except ProxyClientError as error:
            if error.status:
                raise ConfigurationError(f"not a proxy: {error}") from error
            if isinstance(error, UntrustedProxy):
                raise ConfigurationError(str(error)) from error
            return False
    return True


@contextmanager
def _served(arguments: Namespace) -> Iterator[str]:
    """Runs `agentic-proxy serve` on a free port; yields its URL once it listens."""
    command = [sys.executable, "-m", "proxy", "serve", "--port", "0"]
    for name in ("config", "model", "store"):
        if (value := getattr(arguments, name)) is not None:
            command += [f"--{name}", str(value)]
    for url in arguments.engine or ():
        command += ["--engine", url]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, start_new_session=True, encoding="utf-8"
    )
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        listens = _LISTENS.match(line)
        if listens is None:
            raise ConfigurationError("the proxy did not start; its message is above")
        for _ in range(2):  # the variables, and the place of the admin key
            process.stdout.readline()
        yield listens[1]
    finally:
        process.terminate()
        process.wait()
        process.stdout.close()


def configuration(arguments: Namespace) -> ProxyConfig:
    """The proxy's configuration with the flags that are given."""
    given = {name: getattr(arguments, name) for name in ("model", "store")}
    engines = [{"url": url} for url in arguments.engine or ()]
    overrides: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    return load_config(arguments.config, **overrides, **({"engines": engines} if engines else {}))


def private_files(config: ProxyConfig) -> list[Path]:
    """The proxy's files, which an agent must not read: other sessions, and the keys."""
    key = key_file(config)
    link = key.with_name(key.name + ".link")
    people = [path.expanduser().absolute() for path in config.people.values()]
    files = [key, link, *people, *state_folder().glob("vllm*.url")]
    scheme, _, rest = config.store.partition(":///")
    if scheme == "sqlite":
        files += [Path(rest + suffix).absolute() for suffix in ("", "-wal", "-shm")]
    return files
