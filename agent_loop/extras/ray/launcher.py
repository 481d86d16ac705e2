"""The `ray` launcher: each trial's agent is a program in a Ray task, on any node of the cluster.

    queued (at most `agents` at the same time) ──▶ waiting for a node ──▶ running ──▶ ended
                                                           │             └─▶ node lost
                                                           └─▶ no node in room_timeout_s

Invariant: when `run` returns, raises or is cancelled, the agent and all its descendants have ended,
or their node is out of reach. What Ray says about a task is not enough for this: it may report the
end of a task whose agent is still being ended, and it cannot end one whose worker is suspended. So
each agent has a connection to this process (`lifeline.py`), by which it is ended and its end is
known. Ray places agents, carries what they leave, and reports lost workers and nodes. It starts no
task a second time: a trial whose node was lost fails as our fault, and the trial loop starts a new
one.
"""

from __future__ import annotations

import asyncio
import io
import socket
import tarfile
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pydantic import Field

from agent_loop.errors import LaunchError
from agent_loop.launchers.agent_process import agent_result, run_agent
from agent_loop.launchers.command import ArgvConfig
from agent_loop.launchers.lifeline import Lifeline, LifelineAddress, LifelineListener
from agent_loop.launchers.protocol import OVERHEAD_S
from agent_loop.processes.host import END_TIMEOUT_S, PROCESS, Ended, ProcessConfig, ProcessHost
from agent_loop.records import AgentResult, Trial
from proxy import wall
from proxy.errors import ConfigurationError
from proxy.machine import landlock
from proxy.settings.reaching import ClusterAgents, RayResources
from proxy.wall import Wall

LOST_S = 100.0
"""Seconds in addition to `grace_s` after which an agent counts as out of reach: more than the 90 s
after which the probes of a lifeline end it on a node that the network does not reach."""
COLLECT_S = 300.0
"""Seconds after an agent's end within which its node has sent what it left."""


class RayConfig(ClusterAgents, RayResources, ArgvConfig):
    """Example: RayConfig(argv=("my-agent", "{prompt}"), num_cpus=0.5)"""

    address: str = "auto"
    """The cluster: `HOST:PORT` of its head, or `auto`: the cluster of this machine or of
    RAY_ADDRESS. With `cluster.backend: ray`, it is the run's own cluster."""
    num_cpus: float = Field(1.0, ge=0)
    """Cores that Ray reserves for an agent on its node, which bounds the agents of a node."""
    memory_bytes: int = Field(0, ge=0)
    """Bytes of memory that Ray reserves for an agent on its node; 0: none.
    `process.limits.memory_bytes` bounds what it uses."""
    workspace_bytes: int = Field(64 << 20, ge=0)
    """Maximum size of the agent's working directory, which is copied back for the reward."""

    def warning(self, sandbox: str) -> str:
        if sandbox == "off":
            return (
                "warning: remote_agent.sandbox=off: agents can read what Ray's user can read on "
                "their nodes, and can connect to Ray"
            )
        return (
            "remote_agent.ray: each node builds the wall of its agents; where one cannot, its "
            "trials fail and say what it lacks (docs/wall.md)"
        )

    def build(self, process: ProcessConfig = PROCESS) -> RayLauncher:
        return RayLauncher(self, process)


@dataclass(frozen=True, slots=True)
class FinishedAgent:
    """What a node sends back. Example: FinishedAgent(Ended("exit", …), b"hello", b"…")"""

    ended: Ended
    log: bytes
    workspace: bytes
    """The working directory as a tar archive, compressed with gzip."""


class RayLauncher:
    """Runs each trial's agent in a task of a Ray cluster."""

    def __init__(self, settings: RayConfig, process: ProcessConfig = PROCESS) -> None:
        """Raises ConfigurationError: the extra `ray` is not installed."""
        try:
            import ray
        except ImportError as error:
            raise ConfigurationError(
                "remote_agent.ray: Ray is not installed: pip install 'agentic-rl[ray]'"
            ) from error
        self._ray: Any = ray
        self._settings = settings
        self._process = process
        self._places = asyncio.Semaphore(settings.agents)
        self._opening = asyncio.Lock()
        self._own_connection = False
        self._listener = LifelineListener()

    @property
    def overhead_s(self) -> float:
        return 2 * self._settings.room_timeout_s + OVERHEAD_S

    async def run(self, trial: Trial) -> AgentResult:
        async with self._place():
            await self._open()
            finished = await self._in_task(trial)
        (trial.directory / "agent.log").write_bytes(finished.log)
        await asyncio.to_thread(_unpack, finished.workspace, trial.workspace)
        return agent_result(finished.ended)

    async def close(self) -> None:
        self._listener.close()
        if self._own_connection:
            self._own_connection = False
            await asyncio.to_thread(self._ray.shutdown)

    @asynccontextmanager
    async def _place(self) -> AsyncIterator[None]:
        wait_s = self._settings.room_timeout_s
        try:
            async with asyncio.timeout(wait_s):
                await self._places.acquire()
        except TimeoutError:
            raise LaunchError(
                f"ray: none of {self._settings.agents} agents ended within {wait_s:.0f} s: raise "
                "remote_agent.ray.agents or lower rollout.concurrency"
            ) from None
        try:
            yield
        finally:
            self._places.release()

    async def _open(self) -> None:
        """Connects to the cluster, unless this process is connected to one.

        Raises:
            LaunchError: no cluster answers.
        """
        async with self._opening:
            if self._ray.is_initialized():
                return
            address = self._settings.address
            try:
                await asyncio.to_thread(self._ray.init, address=address, log_to_driver=False)
            except (OSError, RuntimeError, ValueError, self._ray.exceptions.RayError) as error:
                raise LaunchError(
                    f"remote_agent.ray.address={address!r}: no Ray cluster answers "
                    f"({_one_line(error)}); start one with `ray start --head`"
                ) from error
            self._own_connection = True

    async def _in_task(self, trial: Trial) -> FinishedAgent:
        """Raises LaunchError: no node had room, or the agent's node was lost."""
        line = await self._listener.expect(self._ray.util.get_node_ip_address())
        ref = self._submit(trial, line.address)
        task = asyncio.wrap_future(ref.future())
        try:
            node = await self._started(task, line)
            return await self._finished(task, node, trial.timeout_s)
        finally:
            grace_s = self._process.grace_s
            if not await line.end(grace_s + END_TIMEOUT_S + LOST_S):
                self._ray.cancel(ref, force=True)  # its agent ends with its worker
            elif not task.done():
                self._ray.cancel(ref)  # it waits for a node, or packs what nobody wants
            if not task.cancel() and not task.cancelled():
                task.exception()  # what went wrong has been raised, or the trial was cancelled

    def _submit(self, trial: Trial, address: LifelineAddress) -> Any:
        """The task's ObjectRef."""
        settings = self._settings
        options: dict[str, Any] = {
            "num_cpus": settings.num_cpus,
            "resources": dict(settings.resources),
            "max_retries": 0,
            "scheduling_strategy": "SPREAD",
            "name": f"agent {trial.trial_id}",
        }
        if settings.memory_bytes:
            options["memory"] = settings.memory_bytes
        # What rewards see and the agent does not stays on this machine.
        own = replace(trial.task, data=trial.agent_data)
        sent = replace(trial, task=own)
        return (
            self._ray.remote(_run_on_node)
            .options(**options)
            .remote(sent, settings, self._process, address)
        )

    async def _started(self, task: asyncio.Future[FinishedAgent], line: Lifeline) -> str:
        """The address of the node on which the task has started.

        Raises:
            LaunchError: no node had room, or the task failed before its agent could start.
        """
        wait_s = self._settings.room_timeout_s
        await asyncio.wait(
            (task, line.connected), timeout=wait_s, return_when=asyncio.FIRST_COMPLETED
        )
        if line.connected.done():
            return line.connected.result()
        if task.done():
            await self._finished(task, "(it has not connected)", 0.0)
        wanted = {"CPU": self._settings.num_cpus, **self._settings.resources}
        raise LaunchError(
            f"ray: no node had room for {wanted} within {wait_s:.0f} s; the cluster has "
            f"{self._ray.cluster_resources()}: add nodes, or lower remote_agent.ray.num_cpus, "
            "resources or rollout.concurrency"
        )

    async def _finished(
        self, task: asyncio.Future[FinishedAgent], node: str, timeout_s: float
    ) -> FinishedAgent:
        """Raises LaunchError: the task failed, was lost, or does not report its agent's end."""
        limit_s = timeout_s + self._process.grace_s + END_TIMEOUT_S + COLLECT_S
        try:
            async with asyncio.timeout(limit_s):
                return await task
        except self._ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, LaunchError):
                raise error.cause from None
            raise LaunchError(f"ray: the task on {node} failed: {_one_line(error)}") from error
        except self._ray.exceptions.RayError as error:
            raise LaunchError(
                f"ray: the agent was lost with its worker or its node {node}: {_one_line(error)}"
            ) from error
        except TimeoutError:
            raise LaunchError(
                f"ray: node {node} has not reported the end of its agent within {limit_s:.0f} s"
            ) from None


def _run_on_node(
    trial: Trial, settings: RayConfig, process: ProcessConfig, address: LifelineAddress
) -> FinishedAgent:
    """The Ray task."""
    with address.connect() as line:
        return asyncio.run(_run_agent(trial, settings, process, line))


async def _run_agent(
    trial: Trial, settings: RayConfig, process: ProcessConfig, line: socket.socket
) -> FinishedAgent:
    with tempfile.TemporaryDirectory(prefix="agent-") as folder:
        behind = (
            None
            if trial.wall is None
            else await asyncio.to_thread(_wall_of_node, trial.wall, trial.base_url)
        )
        here = replace(trial, directory=Path(folder), wall=behind)
        host = ProcessHost()
        try:
            ended = await run_agent(
                host, here, settings, process, argv=settings.argv, lifeline=line
            )
        finally:
            await host.close()
        if ended.ended_by == "cancel":
            return FinishedAgent(ended, b"", b"")  # nobody waits for it
        log = (here.directory / "agent.log").read_bytes()
        return FinishedAgent(ended, log, _packed(here.workspace, settings.workspace_bytes))


def _wall_of_node(wanted: Wall, base_url: str) -> Wall:
    """The wall as this node builds it: Ray's ports are refused, and its sockets, logs and token
    hidden, with which an agent could run programs on every node.

    Raises:
        LaunchError: this node does not hold it.
    """
    from agent_loop.extras.ray.here import RayHere

    name = socket.gethostname()
    if (reason := wall.missing()) is not None:
        raise LaunchError(
            f"ray: node {name} cannot put agents behind a wall ({reason}); allow namespaces there, "
            "or set remote_agent.sandbox=off"
        )
    if parts := wall.lacking(wanted.accepted):
        said = "; ".join(f"{wall.PARTS[part]} ({why})" for part, why in parts.items())
        words = f"light without {', '.join(sorted({*parts, *wanted.accepted}))}"
        raise LaunchError(
            f"ray: node {name} does not hold all of docs/wall.md: {said}; use a newer kernel there,"
            f' or accept it: remote_agent.sandbox="{words}"'
        )
    if landlock.missing() is not None:  # which has been accepted
        return replace(wanted, ports=frozenset())
    found = RayHere.find()
    ports = wanted.ports | found.ports_here()
    hidden = (str(path) for path in found.paths)
    ports -= {urlsplit(base_url).port}
    return replace(wanted, ports=ports, hide=(*wanted.hide, *hidden))


def _packed(folder: Path, limit_bytes: int) -> bytes:
    size = sum(each.lstat().st_size for each in folder.rglob("*"))
    if size > limit_bytes:
        raise LaunchError(
            f"ray: the agent left {size} bytes in its working directory, and at most {limit_bytes}"
            " are copied back; raise remote_agent.ray.workspace_bytes, or let the agent delete what"
            " the reward does not need"
        )
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz", compresslevel=1) as archive:
        archive.add(folder, arcname=".")
    return packed.getvalue()


def _unpack(packed: bytes, folder: Path) -> None:
    """Without what leads out of the folder, and pipes: no agent ends its own judgement by these."""
    folder.mkdir()
    with tarfile.open(fileobj=io.BytesIO(packed), mode="r:gz") as archive:
        archive.extractall(folder, filter=_kept)


def _kept(member: tarfile.TarInfo, folder: str) -> tarfile.TarInfo | None:
    try:
        return tarfile.data_filter(member, folder)
    except tarfile.FilterError:
        return None


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
