"""`agentic-proxy rewind SESSION --turn K -- PROGRAM …`: runs an agent again from a recorded turn.

Each continuation is an `agentic-proxy run --from SESSION --turn K` in a process and a folder of its
own; at the end, a table compares them. Invariant: when the command ends, also by Ctrl-C, all agents
have ended and their sessions are completed.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import sys
from argparse import Namespace
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from proxy.client import ProxyClient, ProxyClientError
from proxy.commands.run import configuration, origin_of, private_files, running
from proxy.commands.terminal import one_line
from proxy.config import ProxyConfig
from proxy.errors import ConfigurationError
from proxy.records import Reward, SessionStatus

CHECK = "check"
"""The key of the reward that --check gives."""
_SHOWN_CHARS = 100


@dataclass(frozen=True, slots=True)
class Continuation:
    """One run of the agent: its session, its folder, and how it ended."""

    name: str
    folder: Path
    code: int

    @property
    def log(self) -> Path:
        return self.folder / "agent.log"


def rewind(arguments: Namespace) -> int:
    """Returns 0 if every agent has ended with success, and else 1."""
    config = configuration(arguments)
    if arguments.n < 1 or arguments.jobs < 1:
        raise ConfigurationError(f"-n {arguments.n} --jobs {arguments.jobs}: both are at least 1")
    if arguments.workspace is not None and not arguments.workspace.is_dir():
        raise ConfigurationError(f"--workspace {arguments.workspace}: there is no such folder")
    origin_of(arguments)
    with running(arguments, config, may_start=True) as client:
        done = asyncio.run(_all(arguments, config, client))
    return int(any(each.code for each in done))


async def _all(
    arguments: Namespace, config: ProxyConfig, client: ProxyClient
) -> list[Continuation]:
    out = arguments.out / f"{arguments.origin.replace('/', '_')}-{secrets.token_hex(3)}"
    free = asyncio.Semaphore(arguments.jobs)
    async with client:
        command = _command(arguments, config, client)
        try:
            known = len((await client.show(arguments.origin))["turns"])
        except ProxyClientError as error:
            raise ConfigurationError(f"rewind {arguments.origin}: {error}") from error
        if not 1 <= arguments.turn <= known:
            raise ConfigurationError(
                f"--turn {arguments.turn}: session {arguments.origin} has {known} turns; give a"
                f" number from 1 to {known}"
            )

        async def one(number: int) -> Continuation:
            async with free:
                return await _continue(arguments, command, out / str(number), client.admin_key)

        done = await asyncio.gather(*(one(number) for number in range(1, arguments.n + 1)))
        rows = []
        for each in done:
            if arguments.check is not None:
                await _check(client, each, arguments.check)
            rows.append(await _row(client, each))
    table = Table(
        "session", "exit", "turns", "sampled", "diverged", "rewards", box=None, pad_edge=False
    )
    for row in rows:
        table.add_row(*(Text(one_line(cell)) for cell in row))
    Console(soft_wrap=True).print(table)
    print(f"folders and logs: {out}")
    return done


async def _continue(
    arguments: Namespace, command: list[str], folder: Path, admin_key: str | None
) -> Continuation:
    work = folder / "work"
    if arguments.workspace is None:
        work.mkdir(parents=True)
    else:
        await asyncio.to_thread(shutil.copytree, arguments.workspace, work, symlinks=True)
    name = f"{arguments.origin}.{arguments.turn}.{secrets.token_hex(4)}"
    env = {**os.environ, **({"AGENTIC_PROXY_ADMIN_KEY": admin_key} if admin_key else {})}
    with (folder / "agent.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *command,
            *("--session", name, "--", *arguments.program),
            cwd=work,
            env=env,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=asyncio.subprocess.STDOUT,
        )
        try:
            code = await process.wait()
        finally:
            if process.returncode is None:
                process.terminate()
                await process.wait()
    return Continuation(name, folder, code)


def _command(arguments: Namespace, config: ProxyConfig, client: ProxyClient) -> list[str]:
    """`agentic-proxy run` for one continuation; its working folder is another one."""
    command = [sys.executable, "-m", "proxy", "run", "--url", client.base_url]
    command += ["--from", arguments.origin, "--turn", str(arguments.turn)]
    command += ["--sandbox", arguments.sandbox, *(["--live"] if arguments.live else [])]
    for path in private_files(config):
        command += ["--hide", str(path)]
    for tag in arguments.tag:
        command += ["--tag", tag]
    for flag, value in (("--agent", arguments.agent), ("--edit", arguments.edit)):
        command += [] if value is None else [flag, value]
    for flag, path in (("--answer", arguments.answer), ("--config", arguments.config)):
        command += [] if path is None else [flag, str(path.absolute())]
    return command


async def _check(client: ProxyClient, done: Continuation, command: str) -> None:
    with done.log.open("ab") as log:
        process = await asyncio.create_subprocess_shell(
            command, cwd=done.folder / "work", stdout=log, stderr=log
        )
        passed = await process.wait() == 0
    try:
        await client.add_reward(done.name, Reward(CHECK, float(passed)))
    except ProxyClientError as error:
        if error.status != HTTPStatus.NOT_FOUND:  # it has no session, which its row says
            raise


async def _row(client: ProxyClient, done: Continuation) -> list[str]:
    try:
        record = await client.show(done.name)
    except ProxyClientError:
        return [done.name, str(done.code), "", "", f"not started; see {done.log}", ""]
    if record["status"] == SessionStatus.OPEN:  # `run` was killed; else its events do not end
        await client.complete(done.name)
    own = [turn for turn in record["turns"] if turn["recorded_by"] is None]
    diverged = [e async for e in client.events(done.name) if e["kind"] == "diverged"]
    return [
        done.name,
        str(done.code),
        f"{len(record['turns']) - len(own)} + {len(own)}",
        str(sum(turn["sampled_tokens"] for turn in own)),
        _where(diverged[0]) if diverged else "",
        " ".join(f"{reward['key']}={reward['value']:g}" for reward in record["rewards"]),
    ]


def _where(event: dict[str, Any]) -> str:
    return f"turn {event['turn']}: {event['summary']}"[:_SHOWN_CHARS]
