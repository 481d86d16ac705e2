"""The `ray` launcher: each trial's agent is a program in a Ray task, on any node of the cluster.

    queued (at most `agents` at the same time) ──▶ waiting for a node ──▶ running ──▶ ended
                                                           │             └─▶ node lost
                                                           └─▶ no node in start_timeout_s

Invariant: when `run` returns, raises or is cancelled, the agent and all its descendants have ended,
or their node is out of reach. Ray starts no task a second time: a trial whose node was lost fails
as our fault, and the trial loop starts a new one.
"""

from __future__ import annotations

import asyncio
import io
import tarfile
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import Field

from agent_loop.errors import LaunchError
from agent_loop.launchers.agent_process import ProcessSettings, agent_result, run_agent
from agent_loop.launchers.protocol import OVERHEAD_S, LauncherConfig
from agent_loop.processes.host import END_TIMEOUT_S, Ended, ProcessHost
from agent_loop.records import AgentResult, Trial
from proxy.errors import ConfigurationError

LOST_S = 30.0
"""Seconds after `grace_s` within which a cancelled task has ended; then its worker is killed."""


class RayConfig(ProcessSettings, LauncherConfig):
    """Example: RayConfig(argv=("my-agent", "{prompt}"), num_cpus=0.5)"""

    argv: tuple[str, ...] = Field(min_length=1)
    """The program and its arguments, on the node. Placeholders are replaced there."""
    address: str = "auto"
    """The cluster: `HOST:PORT` of its head, or `auto`: the cluster of this machine or of
    RAY_ADDRESS. With `cluster.backend: ray`, it is the run's own cluster."""
    agents: int = Field(1000, ge=1)
    """Maximum number of agents of this run at the same time; further trials wait."""
    num_cpus: float = Field(1.0, ge=0)
    """Cores that Ray reserves for an agent on its node, which bounds the agents of a node."""
    memory_bytes: int = Field(0, ge=0)
    """Bytes of memory that Ray reserves for an agent on its node; 0: none. `limits.memory_bytes`
    bounds what it uses."""
    resources: Mapping[str, float] = Field(default_factory=dict)
    """Ray's custom resources that an agent reserves on its node, such as `{agents: 1}`."""
    start_timeout_s: float = Field(600.0, gt=0)
    """Seconds that a trial waits for one of `agents`, and then for a node with room."""
    workspace_bytes: int = Field(64 << 20, ge=0)
    """Maximum size of the agent's working directory, which is copied back for the reward."""

    @property
    def needs_prompt(self) -> bool:
        """True if the command contains `{prompt}` or TASK_PROMPT."""
        texts = (*self.argv, *self.env.values())
        return any("{prompt}" in text or "TASK_PROMPT" in text for text in texts)

    def build(self) -> RayLauncher:
        return RayLauncher(self)


@dataclass(frozen=True, slots=True)
class FinishedAgent:
    """What a node sends back. Example: FinishedAgent(Ended("exit", …), b"hello", b"…")"""

    ended: Ended
    log: bytes
    workspace: bytes
    """The working directory as a tar archive, compressed with gzip."""


class RayLauncher:
    """Runs each trial's agent in a task of a Ray cluster."""

    def __init__(self, settings: RayConfig) -> None:
        """Raises ConfigurationError: the extra `ray` is not installed."""
        try:
            import ray
        except ImportError as error:
            raise ConfigurationError(
                "remote_agent.ray: Ray is not installed: pip install 'agentic-rl[ray]'"
            ) from error
        self._ray: Any = ray
        self._settings = settings
        self._places = asyncio.Semaphore(settings.agents)
        self._opening = asyncio.Lock()
        self._own_connection = False

    @property
    def overhead_s(self) -> float:
        return 2 * self._settings.start_timeout_s + OVERHEAD_S

    async def run(self, trial: Trial) -> AgentResult:
        async with self._place():
            await self._open()
            finished = await self._in_task(trial)
        (trial.directory / "agent.log").write_bytes(finished.log)
        await asyncio.to_thread(_unpack, finished.workspace, trial.workspace)
        return agent_result(finished.ended)

    async def close(self) -> None:
        if self._own_connection:
            self._own_connection = False
            await asyncio.to_thread(self._ray.shutdown)

    @asynccontextmanager
    async def _place(self) -> AsyncIterator[None]:
        wait_s = self._settings.start_timeout_s
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
        sent = replace(trial, task=own, wall=None)
        task = self._ray.remote(_run_on_node).options(**options).remote(sent, settings)
        node = ""
        try:
            node = await self._started(task)
            limit_s = trial.timeout_s + settings.grace_s + END_TIMEOUT_S + LOST_S
            async with asyncio.timeout(limit_s):
                finished: FinishedAgent = await (await anext(task))
            return finished
        except self._ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, LaunchError):
                raise error.cause from None
            raise LaunchError(f"ray: the task on {node} failed: {_one_line(error)}") from error
        except (self._ray.exceptions.RayError, StopAsyncIteration) as error:
            raise LaunchError(
                f"ray: the agent was lost with its worker or its node {node}: {_one_line(error)}"
            ) from error
        except TimeoutError:
            await self._end(task)
            raise LaunchError(
                f"ray: node {node} has not reported the end of its agent within {limit_s:.0f} s"
            ) from None
        except asyncio.CancelledError:
            await self._end(task)
            raise

    async def _started(self, task: Any) -> str:
        """The address of the node on which the task has started.

        Raises:
            LaunchError: no node had room.
        """
        wait_s = self._settings.start_timeout_s
        try:
            async with asyncio.timeout(wait_s):
                node: str = await (await anext(task))
                return node
        except TimeoutError:
            await self._end(task)
            wanted = {"CPU": self._settings.num_cpus, **self._settings.resources}
            raise LaunchError(
                f"ray: no node had room for {wanted} within {wait_s:.0f} s; the cluster has "
                f"{self._ray.cluster_resources()}: add nodes, or lower remote_agent.ray.num_cpus, "
                "resources or rollout.concurrency"
            ) from None

    async def _end(self, task: Any) -> None:
        """Cancels the task, and returns when its agent has ended, also if this call is
        cancelled."""
        ending = asyncio.create_task(self._cancelled(task))
        while not ending.done():
            try:
                await asyncio.shield(ending)
            except asyncio.CancelledError:
                continue

    async def _cancelled(self, task: Any) -> None:
        last = task.completed()
        self._ray.cancel(task)
        try:
            async with asyncio.timeout(self._settings.grace_s + END_TIMEOUT_S + LOST_S):
                await last
        except TimeoutError:
            self._ray.cancel(task, force=True)  # the agent ends with its worker
        except self._ray.exceptions.RayError:
            pass  # it was cancelled, or its node is lost


def _run_on_node(trial: Trial, settings: RayConfig) -> Iterator[str | FinishedAgent]:
    """The Ray task. Yields the node's address when it starts, then what the agent left."""
    import ray

    yield ray.util.get_node_ip_address()
    yield asyncio.run(_run_agent(trial, settings))


async def _run_agent(trial: Trial, settings: RayConfig) -> FinishedAgent:
    with tempfile.TemporaryDirectory(prefix="agent-") as folder:
        here = replace(trial, directory=Path(folder))
        host = ProcessHost()
        try:
            ended = await run_agent(host, here, settings, argv=settings.argv)
        finally:
            await host.close()
        log = (here.directory / "agent.log").read_bytes()
        return FinishedAgent(ended, log, _packed(here.workspace, settings.workspace_bytes))


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
    """Raises LaunchError: the archive has a link or a device that leads out of the folder."""
    folder.mkdir()
    try:
        with tarfile.open(fileobj=io.BytesIO(packed), mode="r:gz") as archive:
            archive.extractall(folder, filter="data")
    except tarfile.TarError as error:
        raise LaunchError(
            f"ray: the agent's working directory cannot be copied back: {_one_line(error)}"
        ) from error


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
