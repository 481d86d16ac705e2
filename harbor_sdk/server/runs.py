"""`Runs`: the bounded queue between submissions and trials.

Invariant: a run starts at most once. A queued run survives a restart of the server. A running run
is then `lost`, because its agent may already have made calls in its session. A change of a run
wakes those who wait for it; nothing polls.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Protocol

from harbor_sdk.errors import AgentRunError
from harbor_sdk.models import AgentRun, AgentRunRequest, RunEvent, RunStatus
from harbor_sdk.server.config import ServerConfig
from harbor_sdk.server.table import RunTable, Submission

QUEUE_FULL_RETRY_S = 5.0
CANCEL_WAIT_S = 45.0
"""Time for Harbor to end the environment; shorter than clients wait for an answer."""

_log = logging.getLogger(__name__)


class RunTrial(Protocol):
    """The signature of `harbor_sdk.trial.run_trial`; tests pass a function of their own."""

    def __call__(
        self,
        request: AgentRunRequest,
        *,
        run_id: str,
        task_dir: Path | None,
        trials_dir: Path,
        hidden: Sequence[Path],
        on_phase: Callable[[str], Awaitable[None]],
    ) -> Awaitable[AgentRun]: ...


class Runs:
    """Accepts, queues, runs and cancels runs, and wakes those who wait for a change."""

    def __init__(self, config: ServerConfig, table: RunTable, run_trial: RunTrial) -> None:
        self._config = config
        self._table = table
        self._run_trial = run_trial
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._live: dict[str, AgentRun] = {}
        self._numbers: Counter[str] = Counter()
        self._changed: dict[str, asyncio.Event] = {}
        self._slots: dict[str, asyncio.Semaphore] = {}
        self._sweeper: asyncio.Task[None] | None = None
        self._closing = False
        self._submitting = asyncio.Lock()

    @property
    def trials_dir(self) -> Path:
        return self._config.state_dir / "trials"

    @property
    def queued(self) -> int:
        return sum(run.status is RunStatus.QUEUED for run in self._live.values())

    @property
    def running(self) -> int:
        return len(self._live) - self.queued

    async def counts(self) -> dict[str, int]:
        """The number of kept runs by their status."""
        return await self._table.counts()

    async def open(self) -> None:
        """Continues the runs of the previous server: queued runs are queued again, and running ones
        are marked as lost. Files of submissions that it had not accepted are removed."""
        await asyncio.to_thread(self._remove_orphans, await self._table.run_ids())
        for submission in await self._table.unfinished():
            run = submission.run
            self._live[run.run_id] = run
            self._numbers[run.run_id] = await self._table.last_event_number(run.run_id)
            if run.status is RunStatus.QUEUED:
                self._begin(submission)
            else:
                await self._record(
                    run,
                    status=RunStatus.LOST,
                    finished_at=time.time(),
                    error="the server ended during this run: submit it again with a new session",
                )
        self._sweeper = asyncio.create_task(self._remove_old_runs())

    async def close(self) -> None:
        """Ends running trials and their environments. Queued runs stay queued in the table."""
        self._closing = True
        tasks = [*self._tasks.values(), *([self._sweeper] if self._sweeper else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._table.close()

    def require_room(self) -> None:
        if self.queued >= self._config.max_queued:
            raise AgentRunError(
                f"the queue is full ({self.queued} of {self._config.max_queued} runs): retry "
                "later, or raise --max-queued",
                code="queue_full",
                status=429,
                retry_after_s=QUEUE_FULL_RETRY_S,
            )

    async def submit(self, submission: Submission) -> AgentRun:
        """Adds the run to the table and queues it. If an earlier run has the same idempotency key,
        returns that run. Raises AgentRunError if the queue is full, or as `known` does."""
        async with self._submitting:
            known = await self.known(submission.idempotency_key, submission.fingerprint)
            if known is None:
                self.require_room()
                await self._table.insert(submission)
                self._live[submission.run.run_id] = submission.run
                self._begin(submission)
        return known or submission.run

    async def known(self, key: str | None, fingerprint: str) -> AgentRun | None:
        """The earlier run with this idempotency key, or None. Raises AgentRunError with the code
        `conflict` if its request was different."""
        found = await self._table.by_key(key) if key else None
        if found is None:
            return None
        run, of_run = found
        if of_run != fingerprint:
            raise AgentRunError(
                f"Idempotency-Key {key!r} was already used for another request (run {run.run_id}): "
                "send a new key",
                code="conflict",
                status=409,
            )
        return run

    async def get(self, run_id: str) -> AgentRun:
        run = self._live.get(run_id) or await self._table.get(run_id)
        if run is None:
            raise AgentRunError(f"no run {run_id!r}", code="not_found", status=404)
        return run

    async def page(
        self, *, job_id: str | None, status: str | None, limit: int, offset: int
    ) -> tuple[list[AgentRun], int]:
        return await self._table.page(job_id=job_id, status=status, limit=limit, offset=offset)

    async def wait(self, run_id: str, timeout_s: float | None) -> AgentRun:
        """Returns the run when it has ended, or in its present state after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                while not (run := await self.get(run_id)).status.is_final:
                    await self._change(run_id).wait()
        except TimeoutError:
            return await self.get(run_id)
        return run

    async def events(self, run_id: str, after: int) -> AsyncIterator[RunEvent]:
        """Yields all events after number `after` as they happen, up to the final one."""
        while True:
            run = await self.get(run_id)
            changed = self._change(run_id) if not run.status.is_final else None
            for event in await self._table.events_after(run_id, after):
                yield event
                after = event.number
            if changed is None:
                return
            await changed.wait()

    async def cancel(self, run_id: str) -> AgentRun:
        """Cancels the run if it has not ended. Returns it when it has ended, or after
        `CANCEL_WAIT_S`."""
        await asyncio.sleep(0)  # a task that has not begun could not record its end
        task = self._tasks.get(run_id)
        if task and not task.cancelling():  # a second cancel would interrupt Harbor's cleaning up
            task.cancel()
        return await self.wait(run_id, CANCEL_WAIT_S)

    def _begin(self, submission: Submission) -> None:
        run_id = submission.run.run_id
        task = asyncio.create_task(self._run(submission), name=run_id)
        self._tasks[run_id] = task
        task.add_done_callback(lambda _: self._tasks.pop(run_id, None))

    async def _run(self, submission: Submission) -> None:
        run, environment = submission.run, submission.run.environment
        slots = self._slots.setdefault(
            environment, asyncio.Semaphore(self._config.slots(environment))
        )
        try:
            async with slots:
                run = await self._record(run, status=RunStatus.RUNNING, started_at=time.time())
                outcome = await self._trial(submission)
            final = outcome.model_dump(include=_FOUND_BY_TRIAL)
        except asyncio.CancelledError:
            if self._closing:
                raise  # the server ends; `open` of the next server decides about the run
            final = {"status": RunStatus.CANCELLED, "error": "cancelled by DELETE"}
        end = self._record(self._live[run.run_id], finished_at=time.time(), **final)
        await asyncio.shield(end)

    async def _trial(self, submission: Submission) -> AgentRun:
        run_id = submission.run.run_id

        async def on_phase(phase: str) -> None:
            await self._record(self._live[run_id], phase=phase)

        try:
            outcome = await self._run_trial(
                submission.request,
                run_id=run_id,
                task_dir=submission.task_dir,
                trials_dir=self.trials_dir,
                hidden=[self._config.state_dir],
                on_phase=on_phase,
            )
            # A reward may be NaN, and an agent's metadata anything: the table holds JSON.
            return AgentRun.model_validate_json(outcome.model_dump_json())
        except Exception as error:  # noqa: BLE001  # a process boundary: Harbor and the task's code
            _log.exception("run %s failed", run_id)
            kind, message = type(error).__name__, str(error).encode(errors="replace").decode()
            return AgentRun(
                run_id=run_id,
                status=RunStatus.FAILED,
                error=f"{kind}: {' '.join(message.split())}"[:1000],
                error_type=kind,
            )

    async def _record(self, run: AgentRun, **changes: object) -> AgentRun:
        run_id = run.run_id
        changed = AgentRun.model_validate({**run.model_dump(), **changes})
        self._numbers[run_id] += 1
        kind = "phase" if "phase" in changes else "status"
        await self._table.update(
            RunEvent(number=self._numbers[run_id], kind=kind, at=time.time(), run=changed)
        )
        self._live[run_id] = changed
        if changed.status.is_final:
            del self._live[run_id], self._numbers[run_id]
        if event := self._changed.pop(run_id, None):
            event.set()
        return changed

    def _change(self, run_id: str) -> asyncio.Event:
        return self._changed.setdefault(run_id, asyncio.Event())

    def _remove_orphans(self, known: set[str]) -> None:
        for folder in ("uploads", "tasks"):
            for path in (self._config.state_dir / folder).iterdir():
                if folder == "uploads":
                    path.unlink()
                elif path.name not in known:
                    shutil.rmtree(path)

    async def _remove_old_runs(self) -> None:
        while True:
            for run_id in await self._table.finished_before(time.time() - self._config.keep_s):
                for folder in ("trials", "tasks"):
                    path = self._config.state_dir / folder / run_id
                    await asyncio.to_thread(shutil.rmtree, path, ignore_errors=True)
                await self._table.remove(run_id)  # last: the next server goes on with its folders
            await asyncio.sleep(min(self._config.keep_s, 3600.0))


_FOUND_BY_TRIAL = {
    "status",
    "rewards",
    "steps",
    "rollout_details",
    "token_usage",
    "metadata",
    "error",
    "error_type",
    "result_uri",
    "times_s",
}
