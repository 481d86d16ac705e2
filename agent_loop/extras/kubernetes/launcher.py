"""The `kubernetes` launcher: each trial's agent is the pod of a Job of its own.

    queued (at most `jobs` at the same time) ──▶ created ──▶ waiting ──▶ running ──▶ ended
                                                    │           │           └─▶ deadline: timed out
                                                    └───────────┴─▶ cannot start, lost: LaunchError

Invariant: when `run` returns, raises or is cancelled, the trial's pod has ended, or Kubernetes has
been asked to end it. A pod that was evicted, deleted or lost with its node fails the trial as our
fault, and the trial loop starts a new one; a Job never starts a second pod.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import orjson

from agent_loop.errors import LaunchError
from agent_loop.extras.kubernetes.client import (
    Kubernetes,
    KubernetesError,
    PodWatch,
    Seen,
    require_client,
)
from agent_loop.extras.kubernetes.objects import (
    CONTAINER,
    RUN_LABEL,
    JobSettings,
    Object,
    PodPhase,
    PodState,
    failed_condition,
    is_over,
    job_object,
    object_name,
    pod_state,
    secret_object,
)
from agent_loop.launchers.protocol import OVERHEAD_S
from agent_loop.processes.host import PROCESS, ProcessConfig
from agent_loop.processes.supervisor import BoundedLog
from agent_loop.records import NO_REWARD, AgentEnd, AgentResult, Graded, Trial
from agent_loop.reward_values import RewardKey, graded
from proxy.settings.reaching import Patience

END_TIMEOUT_S = 30.0
"""Seconds that a Job may take to disappear, in addition to `grace_s`."""
PULL_S = 300.0
"""Seconds in which the image has to be pulled after the first failure. Kubernetes tries again
after 10, 20, 40, … s."""
LOOK_S = 0.5
"""Seconds between two questions whether a deleted Job is gone."""
NOT_DELETED = (
    "Job %s could not be deleted: %s; its pod may run until the Job's deadline: "
    "`kubectl delete job %s` ends it"
)

Result = TypeVar("Result")
_log = logging.getLogger(__name__)


class KubernetesConfig(RewardKey, Patience, JobSettings):
    """Example: KubernetesConfig(image="registry.local/agent:1", argv=("agent", "{prompt}"))"""

    kubeconfig: Path | None = None
    """The file that names the cluster. None: the cluster of this pod, with its service account,
    or the user's own kubeconfig."""

    @property
    def process_keys(self) -> frozenset[str]:
        return frozenset({"grace_s", "log_bytes"})

    def build(self, process: ProcessConfig = PROCESS) -> KubernetesLauncher:
        return KubernetesLauncher(self, process)


class KubernetesLauncher:
    """Runs each trial's agent in a pod."""

    def __init__(self, settings: KubernetesConfig, process: ProcessConfig = PROCESS) -> None:
        """Raises ConfigurationError: the extra `kubernetes` is not installed."""
        require_client()
        self._settings = settings
        self._process = process
        self._run = f"run-{secrets.token_hex(6)}"
        self._places = asyncio.Semaphore(settings.agents)
        self._opening = asyncio.Lock()
        self._kubernetes: Kubernetes | None = None
        self._pods: PodWatch | None = None

    @property
    def overhead_s(self) -> float:
        return 2 * self._settings.room_timeout_s + OVERHEAD_S

    async def run(self, trial: Trial) -> AgentResult:
        async with self.place():
            kubernetes, pods = await self._opened()
            name = object_name(trial.trial_id)
            with pods.follow(name) as seen:
                await pods.begun(self._settings.patience_s)
                try:
                    return await self._run_job(kubernetes, trial, seen)
                except BaseException:
                    await self._remove(kubernetes, name)
                    raise

    async def close(self) -> None:
        if self._pods is not None:
            await self._pods.close()
        if self._kubernetes is not None:
            await self._kubernetes.close()
        self._kubernetes = self._pods = None

    @asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """Waits for one of the run's Jobs, and holds it.

        Raises:
            LaunchError: none became free.
        """
        wait_s = self._settings.room_timeout_s
        try:
            async with asyncio.timeout(wait_s):
                await self._places.acquire()
        except TimeoutError:
            raise LaunchError(
                f"kubernetes: none of {self._settings.agents} Jobs ended within {wait_s:.0f} s: "
                "raise remote_agent.kubernetes.agents or lower rollout.concurrency"
            ) from None
        try:
            yield
        finally:
            self._places.release()

    async def _opened(self) -> tuple[Kubernetes, PodWatch]:
        async with self._opening:
            if self._kubernetes is None or self._pods is None:
                settings = self._settings
                opened = await Kubernetes.open(
                    settings.kubeconfig, settings.namespace, settings.patience_s
                )
                self._kubernetes, self._pods = opened, PodWatch(opened, f"{RUN_LABEL}={self._run}")
            self._pods.start()
            return self._kubernetes, self._pods

    async def _run_job(
        self, kubernetes: Kubernetes, trial: Trial, seen: asyncio.Queue[Seen]
    ) -> AgentResult:
        created = time.monotonic()
        made = job_object(self._settings, trial, self._run, math.ceil(self._process.grace_s))
        # A request that is dropped may still be carried out, after the one that deletes the Job.
        job = await _completed(kubernetes.create("batch/v1", "jobs", made))
        await _completed(kubernetes.create("v1", "secrets", secret_object(trial, job)))
        timeout_s = self._settings.room_timeout_s
        pod, state = await self._next(kubernetes, seen, job, PodPhase.WAITING, timeout_s)
        started = time.monotonic()
        if state is not None and state.phase is PodPhase.RUNNING:
            timeout_s = trial.timeout_s
            pod, state = await self._next(kubernetes, seen, job, PodPhase.RUNNING, timeout_s, pod)
        wall_s = time.monotonic() - started
        if pod is not None:
            await self._keep_logs(kubernetes, trial, pod)
        if state is not None and state.phase is PodPhase.LOST:
            return await self._pod_lost(kubernetes, job, state, wall_s)
        metrics = {"kubernetes_pending_s": started - created}
        if state is None:
            await self._remove(kubernetes, job["metadata"]["name"])
            return AgentResult(AgentEnd.TIMED_OUT, _late(wall_s), wall_s, metrics=metrics)
        if pod is None or not is_over(pod):
            await self._remove(kubernetes, job["metadata"]["name"])
        reward = self._reward(state)
        failed = state.exit_code != 0
        return AgentResult(
            AgentEnd.CRASHED if failed else AgentEnd.EXITED,
            error=f"exit code {state.exit_code} ({state.reason})" if failed else None,
            wall_s=state.wall_s,
            reward=reward.value,
            reward_parts=reward.parts,
            metrics=metrics,
        )

    async def _next(
        self,
        kubernetes: Kubernetes,
        seen: asyncio.Queue[Seen],
        job: Object,
        phase: PodPhase,
        timeout_s: float,
        pod: Object | None = None,
    ) -> tuple[Object | None, PodState | None]:
        """The pod and its state once it has left `phase`; the pod is None if it was deleted before
        it was seen. No state: it still ran after `timeout_s`.

        Raises:
            LaunchError: it cannot be started, has not been started after `timeout_s`, or the API
                does not say whether it has ended by then.
        """
        state, clock = PodState(phase), asyncio.get_running_loop().time
        ends = clock() + timeout_s
        try:
            async with asyncio.timeout_at(ends) as limit:
                while state.phase is phase:
                    found = await seen.get()
                    if isinstance(found, KubernetesError):
                        raise found
                    if found is None:
                        return None, PodState(PodPhase.LOST, "it was deleted")
                    pod, state = found, pod_state(found)
                    pulled_by = min(limit.when() or ends, clock() + PULL_S)
                    limit.reschedule(pulled_by if state.pull_fails else ends)
        except TimeoutError:
            pod, state = await _asked(kubernetes, pod, state)
        if state.phase is phase is PodPhase.RUNNING:
            return pod, None
        if state.phase is phase and not state.pull_fails:
            raise LaunchError(_not_started(job, timeout_s, state))
        if state.phase is PodPhase.HOPELESS or state.pull_fails:
            raise LaunchError(
                f"kubernetes: Job {job['metadata']['name']}: {state.reason}; correct "
                f"remote_agent.kubernetes.image={self._settings.image!r}, or name the registry's "
                "credentials in remote_agent.kubernetes.pod.imagePullSecrets"
            )
        return pod, state

    async def _pod_lost(
        self, kubernetes: Kubernetes, job: Object, state: PodState, wall_s: float
    ) -> AgentResult:
        """The pod did not end by itself: the Job's own deadline ended it, or something that is not
        the agent's fault."""
        name = job["metadata"]["name"]
        try:
            reason = failed_condition(await kubernetes.get("batch/v1", "jobs", name))
        except KubernetesError as error:
            if error.status != 404:
                raise
            reason = ""
        if reason == "DeadlineExceeded":
            return AgentResult(AgentEnd.TIMED_OUT, _late(wall_s), wall_s)
        raise LaunchError(f"kubernetes: the pod of Job {name} was lost: {state.reason}")

    async def _keep_logs(self, kubernetes: Kubernetes, trial: Trial, pod: Object) -> None:
        log = BoundedLog(str(trial.directory / "agent.log"), self._process.log_bytes)
        try:
            async for part in kubernetes.logs(pod["metadata"]["name"], CONTAINER):
                log.write(part)
        except KubernetesError as error:  # the node or the pod is gone
            log.write(f"[the log could not be read: {error}]\n".encode())
        finally:
            log.close()

    async def _remove(self, kubernetes: Kubernetes, name: str) -> None:
        """Deletes the Job and waits until its pod has ended, also if this call is cancelled. An
        error is logged, so that the caller reports the original one; the Job's own deadline then
        ends the pod."""
        await _completed(self._delete(kubernetes, name))

    async def _delete(self, kubernetes: Kubernetes, name: str) -> None:
        deleted = False
        try:
            async with asyncio.timeout(self._process.grace_s + END_TIMEOUT_S):
                await kubernetes.delete_job(name)
                deleted = True
                while True:
                    await kubernetes.get("batch/v1", "jobs", name)
                    await asyncio.sleep(LOOK_S)
        except KubernetesError as error:
            if error.status != 404:
                _log.warning(NOT_DELETED, name, error, name)
        except TimeoutError:
            if deleted:
                _log.warning("Job %s was deleted, but its pod has not ended", name)
            else:
                _log.warning(NOT_DELETED, name, "the API does not answer", name)

    def _reward(self, state: PodState) -> Graded:
        """The termination message is the launcher's reward, if there is one."""
        if not state.message.strip():
            return NO_REWARD
        try:
            value = orjson.loads(state.message)
        except orjson.JSONDecodeError:
            return NO_REWARD  # what a program without a reward writes there, such as its last words
        return graded(value, self._settings.key, "the container's termination message")


async def _completed(work: Coroutine[Any, Any, Result]) -> Result:
    """Its result. If this call is cancelled, it raises only once `work` has ended."""
    task = asyncio.create_task(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        if not task.cancelled():
            task.exception()  # otherwise asyncio logs that nobody has read it
        raise


async def _asked(
    kubernetes: Kubernetes, pod: Object | None, state: PodState
) -> tuple[Object | None, PodState]:
    """The pod and its state according to the API, because the watch may have been interrupted.

    Raises:
        LaunchError: the API does not answer.
    """
    if pod is None:
        return None, state
    try:
        now = await kubernetes.get("v1", "pods", pod["metadata"]["name"])
    except KubernetesError as error:
        if error.status != 404:
            raise
        return None, PodState(PodPhase.LOST, "it was deleted")
    return now, pod_state(now)


def _late(wall_s: float) -> str:
    return f"ended at its deadline, after {wall_s:.1f} s"


def _not_started(job: Object, timeout_s: float, state: PodState) -> str:
    name = job["metadata"]["name"]
    why = state.reason or "no pod was created, for example because of a quota"
    return (
        f"kubernetes: the pod of Job {name} has not started after {timeout_s:.0f} s: {why}; see "
        f"`kubectl describe job {name}`, add nodes, or raise room_timeout_s"
    )
