"""Starts, continues and ends a run, from its configuration to its exit code.

Invariant: whichever way a run ends, its summary has the status, its processes have ended, its log
is closed and its folder unlocked. Its report is written then; what fails there is a warning.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Literal

import yaml
from pydantic import ValidationError
from transformers.utils.logging import disable_progress_bar

from proxy.engines import vllm_platform
from proxy.machine import logs
from proxy.machine.secrecy import hide_memory
from proxy.run_files.files import replace_file, truncate_jsonl
from proxy.run_files.verdict import verdict_lines
from proxy.settings.late_section import load_extra
from proxy.settings.section import Section
from trainer.assembly import TaskParts, assemble
from trainer.checkpoint import Checkpoints, Mirror, MirroredCheckpoint, Saved, open_mirror
from trainer.cluster.config import ProcessesConfig
from trainer.cluster.device_plan import PLANNED, fitted, gpus_here, plan_devices
from trainer.cluster.ranks import check_seat, starts_engines_early, torchrun_seat
from trainer.config import TrainerConfig
from trainer.errors import CheckpointError, ConfigError
from trainer.mains.registry import Parts, follow_rank_0, main_of
from trainer.policy.model_config import ModelConfig
from trainer.policy.parallelism import Seat
from trainer.policy.proof import whole_trees
from trainer.ranks_config import RanksConfig
from trainer.run.control import Ended, RunControl, StopRequested
from trainer.run.folder import RunFolder
from trainer.run.log import RunLog, failure_of
from trainer.run.warned_errors import errors_as_warnings
from trainer.settings.sources import checked, dump, dump_changed
from trainer.settings.values import Sources, changed_keys


def check_only(sources: Sources, *, changed: bool = False) -> str:
    """Checks everything that can be checked without starting a process; returns the resolved
    configuration as YAML (`changed`: only what is not a default), in whose comments is what the run
    prints of its processes at its start.
    """
    written = dump_changed if changed else dump
    config = checked(sources)
    open_mirror(config.trainer.checkpoint_mirror, keep_last=config.trainer.keep_last)
    parts = _leads(config, environment={})
    if parts is None:
        return written(config)
    shown = config if config.sft else parts.config
    return written(shown) + "".join(f"# {line}\n" for line in _placement(parts))


def begin(sources: Sources) -> int:
    """Runs to the end: a new run, or one to continue by `trainer.resume`; returns the exit code."""
    config = checked(sources)
    parts = _leads(config, sources.environment)
    if parts is None:
        return 0
    match config.trainer.resume:
        case "never":
            return _begin_new(parts)
        case "auto":
            return _begin_or_continue(parts, _planned(config.model))
        case path:
            return _continue(parts, RunFolder.open(Path(path)))


def resume(path: Path, sources: Sources) -> int:
    """Continues the run in the folder `path`, whose own configuration is among the sources; returns
    the exit code."""
    folder = RunFolder.open(path)
    parts = _leads(checked(sources), sources.environment)
    return 0 if parts is None else _continue(parts, folder)


def _leads(config: TrainerConfig, environment: Mapping[str, str]) -> Parts | None:
    """The parts of the run; None if this process was another rank than 0, and has finished."""
    if config.sft is None:
        return None if _follows(config, environment) else assemble(config)
    parts: Parts = main_of("sft").assemble(config)
    return None if _follows(parts.config, environment) else parts


def _begin_or_continue(parts: Parts, planned: frozenset[str]) -> int:
    """Continues the last run of this folder and configuration, if it has neither ended nor is
    running; else begins a new run, and says why. `planned`: the keys that the plan decides."""
    config = parts.config
    folder = RunFolder.latest(config.trainer.run_dir)
    if folder is None and (mirrored := _mirrored(config)) is not None:
        return _continue_on_empty_disk(parts, planned, *mirrored)
    if folder is None or folder.read_summary().get("status") == "done":
        return _begin_new(parts)
    if folder.is_running:
        return _begin_new(parts, f"{folder.path} is running in another process: this is a new run")
    changed = _changed_keys(folder.config.read_text(encoding="utf-8"), config, planned)
    if not changed:
        return _continue(parts, folder)
    return _begin_new(
        parts,
        f"{folder.path} has not ended, but its configuration is another one "
        f"({', '.join(changed[:8])}): this is a new run. To continue that run with this "
        f"configuration, add trainer.resume={folder.path}",
    )


def _begin_new(parts: Parts, *notes: str) -> int:
    if (mirrored := _mirrored(parts.config)) is not None:
        mirror, copy = mirrored
        raise ConfigError(
            f"trainer.checkpoint_mirror={mirror.url} has the checkpoint of step {copy.step} of "
            "another run, and this is a new run; give each run its own URL, or delete that folder"
        )
    folder = RunFolder.create(parts.config.trainer.run_dir)
    replace_file(folder.config, dump(parts.config))
    return _run(parts, folder, None, *notes)


def _planned(model: ModelConfig) -> frozenset[str]:
    """The keys that `fitted` decides, because they are not given."""
    return frozenset(f"model.{key}" for key in PLANNED if getattr(model, key) is None)


def _changed_keys(written: str, config: Section, planned: frozenset[str]) -> list[str]:
    """The keys whose values differ from those that a run has written. A key that an earlier release
    did not have has its default there, so that an upgrade does not begin another run; what the plan
    of GPUs decides may differ, because the run may continue on another machine."""
    before = yaml.safe_load(written)
    with suppress(ValidationError):  # of a run that has a key which is gone
        before = yaml.safe_load(dump(type(config).model_validate(before)))
    changed = changed_keys(before, yaml.safe_load(dump(config)))
    return [key for key in changed if key not in planned]


def _continue(parts: Parts, folder: RunFolder) -> int:
    """Continues from the last checkpoint, or from the beginning; returns the exit code.

    The steps after that checkpoint are repeated, and their former lines are deleted.
    """
    folder.lock()
    return _continue_locked(parts, folder)


def _continue_on_empty_disk(
    parts: Parts, planned: frozenset[str], mirror: Mirror, copy: MirroredCheckpoint
) -> int:
    """Continues a run of the same configuration, of which only the mirror is left."""
    if changed := _changed_keys(mirror.history(copy, "config.yaml"), parts.config, planned):
        raise ConfigError(
            f"trainer.checkpoint_mirror={mirror.url} has the checkpoint of step {copy.step} of a "
            f"run with another configuration ({', '.join(changed[:8])}); set it as it was to "
            "continue that run, or use another URL for a new run"
        )
    folder = RunFolder.create(parts.config.trainer.run_dir)
    mirror.fetch(copy, folder)
    return _continue_locked(parts, folder, f"fetched {mirror.url}, step {copy.step}")


def _continue_locked(parts: Parts, folder: RunFolder, *notes: str) -> int:
    checkpoints = Checkpoints(folder.checkpoints, keep_last=parts.config.trainer.keep_last)
    mirrored, damage = _mirrored(parts.config), checkpoints.damaged()
    try:
        saved = checkpoints.latest()
    except CheckpointError:  # none is whole
        if mirrored is None:
            raise
        saved = None
    if mirrored is not None:
        mirror, copy = mirrored
        if copy.run_id != folder.run_id:
            raise ConfigError(
                f"trainer.checkpoint_mirror={mirror.url} has checkpoints of the run {copy.run_id}, "
                f"and {folder.path} is the run {folder.run_id}; give each run its own URL"
            )
        if saved is None or copy.step > saved.step:
            saved = mirror.fetch(copy, folder)
            notes = (*notes, f"fetched {mirror.url}, step {copy.step}")
    for damaged, why in damage.items():
        notes = (*notes, f"{damaged.path.name} is damaged and not used: {why}")
    if saved is not None:
        checkpoints.read_run(saved)  # refuses what cannot be continued, before anything changes
    replace_file(folder.config, dump(parts.config))
    for lines in (folder.metrics, folder.trials_log, folder.phases, *_ledger(parts.config, folder)):
        truncate_jsonl(lines, saved.step if saved else 0)
    return _run(parts, folder, saved, *notes)


def _ledger(config: RanksConfig, folder: RunFolder) -> Iterator[Path]:
    if _has_ledger(config):
        yield folder.ledger


def _has_ledger(config: RanksConfig) -> bool:
    """Fine-tuning has none: its batches are those of the demonstrations."""
    return config.trainer.deterministic and getattr(config, "sft", None) is None


def _mirrored(config: RanksConfig) -> tuple[Mirror, MirroredCheckpoint] | None:
    """The run's mirror and its newest whole checkpoint; None if there is none."""
    trainer = config.trainer
    mirror = open_mirror(trainer.checkpoint_mirror, keep_last=trainer.keep_last)
    copy = None if mirror is None else mirror.newest()
    return None if mirror is None or copy is None else (mirror, copy)


def _follows(config: ProcessesConfig, environment: Mapping[str, str]) -> bool:
    """If torchrun started this process as another rank than 0, trains with rank 0 until it has
    finished and returns True."""
    seat = torchrun_seat(environment)
    if seat is None or seat.rank == 0:
        return False
    check_seat(config, seat)
    if config.cluster.backend == "local":
        config = _fitted_follower(config, seat, environment)
    # torchrun forwards them, and a terminal sends the last one; rank 0 handles them.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    follow_rank_0(config, seat)
    return True


def _fitted_follower(
    config: ProcessesConfig, seat: Seat, environment: Mapping[str, str]
) -> ProcessesConfig:
    """The configuration with what the plan of this machine decides. The engines of the run are on
    rank 0's machine, where local ranks are ranks."""
    planned = config
    if seat.rank != seat.local_rank:
        engine = config.engine.model_copy(update={"replicas": 0, "sleep": False})
        planned = config.model_copy(update={"engine": engine})
    model = fitted(planned, gpus_here(), environment).model
    return config.model_copy(update={"model": model})


def _run(parts: Parts, folder: RunFolder, saved: Saved | None, *notes: str) -> int:
    config, control = parts.config, RunControl()
    hide_memory()
    logs.set_up("text", config.logging.log_level)
    disable_progress_bar()  # of checkpoints that are loaded; the run's own progress is shown
    log = RunLog(
        config.logging,
        folder,
        steps=config.trainer.steps,
        resolved=config.model_dump(mode="json"),
        saved_step=saved.step if saved else 0,
        success_at=config.eval.success_at,
        machine=_machine(config.cluster.backend, config.trainer.device),
        gpus=_gpus(config.cluster.backend, config.trainer.device),
        telemetry=getattr(config.telemetry, "endpoint", None),
        begins_with=config.model.path if _has_ledger(config) else None,
    )
    log.progress.say(
        f"run folder: {folder.path} ({folder.config.name} has the whole configuration)"
    )
    for line in _placement(parts):
        log.progress.say(line)
    for note in notes:
        log.progress.say(note)
    if saved is not None:
        log.progress.say(f"continuing from {saved.path}")
    status: Ended | Literal["failed"] = "failed"
    with ExitStack() as last_first:
        last_first.callback(folder.unlock)
        last_first.callback(log.close)
        try:
            status = asyncio.run(_under_signals(parts, log, control))
        finally:
            log.finish(status, **(failure_of(sys.exception()) if status == "failed" else {}))
            _report(log, status)
    return 0 if control.signal_number is None else 128 + control.signal_number


def _placement(parts: Parts) -> Iterator[str]:
    """Warnings of the configuration and of its tasks, lines about the engines that the run starts,
    one for each GPU of this machine that it uses, and one for each of its relay workers."""
    config = parts.config
    if isinstance(config, TrainerConfig):
        yield from (f"warning: {each}" for each in config.warnings)
    if isinstance(parts, TaskParts):
        yield from (f"warning: {each}" for each in parts.warnings)
    if whole := whole_trees(config.model, config.trainer.parallelism):
        yield f"warning: {whole}"
    engine, model = config.engine, config.model
    started = engine.replicas and not engine.urls and config.cluster.backend == "local"
    if started and engine.tensor_parallel > 1 and (little := vllm_platform.little_shared_memory()):
        yield f"warning: {little}"
    plan = plan_devices(config, gpus_here()) if config.cluster.backend == "local" else None
    if engine.replicas and not engine.urls:
        yield from vllm_platform.installed().describe(
            engine.served_dtype(model),
            engine.nice,
            engine.kv_cache_gib if plan is None else plan.kv_cache_gib,
            transport="files of adapters" if model.policy else engine.weight_transfer,
            tolerance=engine.mismatch_tolerance(model),
            repeatable=config.trainer.deterministic,
            early=config.cluster.backend == "local" and starts_engines_early(config.trainer),
        )
    if plan is not None:
        yield from plan.describe()
    if config.relay is not None:
        yield from config.relay.describe(config.cluster.backend)


def _report(log: RunLog, status: str) -> None:
    """Writes and sends the report of a run that has ended; what fails there is a warning."""
    folder, written = log.folder, ""
    with errors_as_warnings(f"{log.folder.report.name} could not be written", log.progress.say):
        report = load_extra("trainer.extras.report:write_report")(folder)
        written = f", {report.page}"
        log.report(report.page, report.transcripts)
    log.progress.say(f"{status} after {log.wall_s:.0f} s: {folder.summary}{written}")
    if (verdict := log.verdict) is not None:
        for line in verdict_lines(verdict):
            log.progress.say(line)


def _gpus(backend: str, device: str) -> int | None:
    """Number of GPUs that the run can use; None: of a cluster, which has its own."""
    return len(gpus_here()) * (device != "cpu") if backend == "local" else None


def _machine(backend: str, device: str) -> str:
    """Example: "16 CPU cores and 2 GPUs (NVIDIA H100)" """
    cores = f"{len(os.sched_getaffinity(0))} CPU cores"
    if backend != "local":
        return f"a {backend} cluster, with rank 0 on {cores}"
    gpus = () if device == "cpu" else gpus_here()
    if not gpus:
        return f"{cores} without a GPU"
    names = ", ".join(sorted({each.name for each in gpus}))
    return f"{cores} and {len(gpus)} GPU{'s' if len(gpus) > 1 else ''} ({names})"


async def _under_signals(parts: Parts, log: RunLog, control: RunControl) -> Ended:
    with control.signals():
        try:
            return await _train(parts, log, control)
        except StopRequested:
            return "stopped"


async def _train(parts: Parts, log: RunLog, control: RunControl) -> Ended:
    """Trains with the main for these parts, which chooses the producer."""
    return await main_of(parts.main).train(parts, log, control)
