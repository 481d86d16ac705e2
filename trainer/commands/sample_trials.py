"""What `agentic-train eval` and `collect` have in common: trials on a model, without a trainer.

The output folder holds the configuration, the sessions, and a line per trial, so that the same
command continues where it was interrupted.
Invariant: when `run_trials` returns or raises, no agent, engine or proxy that it started is left.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from agent_loop.agents import Agents
from agent_loop.endpoint_loop import Endpoint
from agent_loop.producers.protocol import RunsTrials
from agent_loop.producers.trial_list import TrialLine, TrialList
from agent_loop.tasks import held_out_tasks, with_own_tasks
from proxy.client import ProxyClient
from proxy.records import EMPTY_IDS, SessionKind
from proxy.run_files.files import replace_file
from trainer.assembly import RunParts, build_agents
from trainer.cluster.cluster import joining_engines
from trainer.cluster.config import ProcessesConfig
from trainer.cluster.local import LocalCluster
from trainer.config import TrainerConfig
from trainer.errors import ConfigError
from trainer.run.control import RunControl, StopRequested
from trainer.run.folder import RunFolder
from trainer.settings.sources import dump


@dataclass(frozen=True, slots=True)
class TrialRun:
    """Which trials to run. Example: TrialRun(config, Path("evals/base"), "val", 4)"""

    config: TrainerConfig
    folder: Path
    tasks: str
    """`val` or `train`: which files of `data`."""
    repeats: int
    kind: SessionKind
    endpoint: Endpoint | None = None
    """None: our vLLM with the checkpoint of `model.path`."""
    limit: int | None = None
    records: bool = False
    """Whether our proxy records the endpoint's answers; otherwise agents call it themselves."""


def run_trials(run: TrialRun) -> tuple[list[TrialLine], int]:
    """Runs the trials that the folder does not have yet. Returns all lines, and the number of the
    signal that interrupted it, or 0.

    Raises:
        ConfigError, proxy.errors.ConfigurationError: the configuration, or a folder of another one.
    """
    parts = trial_parts(run)
    folder = open_folder(run)
    try:
        return asyncio.run(_under_signals(run, parts, folder))
    finally:
        folder.unlock()


def trial_parts(run: TrialRun) -> RunParts:
    """The tasks and agents of the trials.

    Raises:
        ConfigError, proxy.errors.ConfigurationError: the configuration.
    """
    config = _without_adapters(run)
    several = Agents(config.agents, config.data)
    data = with_own_tasks(config.data, config.remote_agent.agent)
    if run.tasks == "train":
        several, data = several.training_as_held_out(), data.training_as_held_out()
    if config.agents:
        tasks = several.held_out_tasks(run.limit)
    else:
        needs_prompt = config.remote_agent.needs_prompt
        tasks = held_out_tasks(data, needs_prompt=needs_prompt)[: run.limit]
    for section in config.agent_sections.values():
        if run.endpoint is not None and section.judge is not None and section.judge.is_policy:
            raise ConfigError(
                f"judge.model=policy: agents call {run.endpoint.model} at {run.endpoint.url} "
                "themselves, and no policy runs; give the judge a checkpoint or a base_url"
            )
    if not tasks:
        raise ConfigError(f"data.{run.tasks}_files: no tasks; give at least one file of tasks")
    agents = build_agents(config.agent_sections)
    return RunParts(config, tasks, agents, EMPTY_IDS)


def _without_adapters(run: TrialRun) -> TrainerConfig:
    """The configuration of trials that sample from the weights of a checkpoint or an endpoint.

    Raises:
        ConfigError: it has several policies, which are adapters.
    """
    config = run.config
    if config.trainer.policies:
        raise ConfigError(
            f"trainer.policies ({', '.join(config.trainer.policies)}): these trials sample from "
            "the weights of one checkpoint, without adapters; evaluate the policies in their run "
            "(eval.before, eval.every, eval.after)"
        )
    return config.model_copy(update={"model": config.model.model_copy(update={"lora": None})})


def open_folder(run: TrialRun) -> RunFolder:
    """The folder, locked: new, without a trial, or of an interrupted run with the same settings.

    Raises:
        ConfigError: the folder has trials of other settings, is not one of this command, or is in
            use.
    """
    settings = dump(run.config)
    if run.endpoint is not None:
        settings += f"# endpoint: {run.endpoint.model} at {run.endpoint.base_url}\n"
    if not (run.folder / "config.yaml").exists():
        if run.folder.exists():
            raise ConfigError(f"{run.folder}: exists and is not a folder of this command")
        folder = RunFolder.create(run.folder)
        replace_file(folder.config, settings)
        return folder
    folder = RunFolder.open(run.folder)
    folder.lock()
    if folder.config.read_text(encoding="utf-8") != settings:
        if folder.trials_log.exists():
            raise ConfigError(
                f"{run.folder}: has trials of another configuration or model; choose another --out"
            )
        replace_file(folder.config, settings)
    return folder


async def _under_signals(
    run: TrialRun, parts: RunParts, folder: RunFolder
) -> tuple[list[TrialLine], int]:
    control = RunControl()
    with control.signals():
        try:
            async with _loop(run, parts, folder, control) as (loop, proxy):
                trials = TrialList(
                    loop,
                    parts.held_out,
                    run.repeats,
                    run.kind,
                    folder.trials_log,
                    concurrency=run.config.rollout.concurrency,
                    seed=run.config.trainer.seed,
                    proxy=proxy,
                    ended=_Progress(len(parts.held_out) * run.repeats),
                )
                return await control.wait_for(trials.run()), 0
        except StopRequested:
            return [], control.signal_number or 0


class _Progress:
    """Prints a line for each tenth of the trials, and for each failed one."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._ended = 0

    def __call__(self, line: TrialLine) -> None:
        self._ended += 1
        if not line.judged:
            print(f"{line.trial_id}: {line.status}: {line.error}", flush=True)
        if self._ended % max(1, self._total // 10) == 0:
            print(f"{self._ended} trials ended (of {self._total})", flush=True)


@asynccontextmanager
async def _loop(
    run: TrialRun, parts: RunParts, folder: RunFolder, control: RunControl
) -> AsyncIterator[tuple[RunsTrials, ProxyClient | None]]:
    config = parts.config
    async with AsyncExitStack() as stack:
        if run.endpoint is not None and not run.records:
            baseline = parts.endpoint_loop(run.endpoint, folder)
            stack.push_async_callback(baseline.close)
            yield baseline, None
            return
        engine = config.engine
        if run.endpoint is not None:
            engine = engine.model_copy(update={"replicas": 0, "sleep": False})
        planned = config.model_copy(update={"engine": engine})
        cluster = LocalCluster(planned, folder, control, trains=False)
        for line in () if cluster.plan is None else cluster.plan.describe():
            print(line, flush=True)
        hosted = None if run.endpoint is None else _hosted(run.endpoint)
        proxy = await _proxy(config, folder, cluster, control, stack, hosted)
        loop = parts.loop(folder, proxy, cluster.private_paths, cluster.private_ports)
        stack.push_async_callback(loop.close)
        yield loop, proxy


def _hosted(endpoint: Endpoint) -> dict[str, str]:
    """The endpoint as an engine of the proxy, a `proxy.config.EngineConfig`."""
    return {
        "url": endpoint.url,
        "kind": "chat",
        "model": endpoint.model,
        "api_key": endpoint.api_key,
        "name": "hosted",
    }


async def _proxy(
    config: ProcessesConfig,
    folder: RunFolder,
    cluster: LocalCluster,
    control: RunControl,
    stack: AsyncExitStack,
    hosted: dict[str, str] | None,
) -> ProxyClient:
    """Starts the engines, unless there is a `hosted` model or `engine.urls` names running ones, the
    proxy, and the relay workers."""
    if hosted is not None:
        config = config.model_copy(update={"relay": None})
    workers = joining_engines(config, folder, cluster, partial(print, flush=True))
    engines: list[dict[str, str]] = [{"url": url} for url in config.engine.urls]
    if hosted is not None:
        engines = [hosted]
    if not engines:
        for number in range(config.engine.replicas):
            replica = cluster.replica(number)
            stack.push_async_callback(replica.stop)
            await control.wait_for(replica.start())
            engines.append({"url": replica.url, "name": f"engine-{number}"})
    server = config.proxy_server
    settings: dict[str, Any] = {
        "model": str(config.model.path),
        "store": f"sqlite:///{folder.sessions.absolute()}",
        "max_context_tokens": config.engine.max_context_tokens,
        "telemetry": config.telemetry and config.telemetry.model_dump(),
        "rendering": {"renderer": server.renderer, "template_kwargs": server.template_kwargs},
        **workers.proxy_settings,
    }
    proxy = cluster.proxy(settings)
    await proxy.set_engines(engines)
    stack.push_async_callback(proxy.stop)
    await control.wait_for(proxy.start())
    client = await stack.enter_async_context(ProxyClient(proxy.url, proxy.admin_key))
    stack.push_async_callback(workers.stop)
    await control.wait_for(workers.start(proxy.url, client))
    if workers.lives is not None:
        control.watch(workers.lives)
    return client
