"""Checkpoints: everything that a run needs to continue as if it had not been interrupted.

    checkpoints/step-000010/
        state/          weights, moments, schedules (`state_folder.py`)
        run.json        step, version, states of random generators, state of the loop
        model/          the same weights as a Hugging Face checkpoint, with the tokenizer
        adapter/        with `model.lora`: the adapter in PEFT's format
        policies/NAME/  with `trainer.policies`: `state/` and `adapter/` of each policy, in place of
                        the folders above

Invariant: a folder named `step-…` is complete: it is written under another name, flushed to disk
and then renamed. A save that fails (disk full) leaves the earlier checkpoints untouched.
"""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import os
import random
import re
import shutil
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from proxy.run_files.files import replace_file
from proxy.settings.late_section import load_extra
from trainer.errors import CheckpointError
from trainer.policy.checkpoint_type import weight_files
from trainer.run.folder import RunFolder
from trainer.weight_sync.segment import Named

_log = logging.getLogger(__name__)

FORMAT = 2
"""Number of the layout of `run.json` and `state/`. Release 0.1.0 wrote another layout, without this
number."""
SHARD_BYTES = 4 << 30
"""Maximum size of a file of the Hugging Face export."""
_NAME = re.compile(r"step-([0-9]{6}|[1-9][0-9]{6,})")
_PARTIAL = re.compile(rf"\.{_NAME.pattern}")
_COPIED = (
    *("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.py"),
    *("LICENSE*", "LICENCE*", "NOTICE*", "USE_POLICY*"),
)
"""Patterns of the files of a checkpoint folder that are not weights: configuration, tokenizer, chat
template, own code of the model and the tokenizer, and the terms that copies must have."""
_TYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
"""Names of types in safetensors."""
_COPIED_FOLDERS = ("additional_chat_templates",)


@dataclass(frozen=True, slots=True)
class Saved:
    """Example: Saved(Path("runs/a/checkpoints/step-000010"), step=10)"""

    path: Path
    step: int


class Saves(Protocol):
    """An object with weights and state to save. Implementation: `Models`."""

    def save_state(self, folder: Path) -> None: ...

    def load_state(self, folder: Path) -> None: ...

    def weights(self) -> Generator[Named]: ...

    def save_adapter(self, folder: Path) -> None:
        """Writes the LoRA adapter in PEFT's format; nothing if there is none."""
        ...


class Checkpoints:
    """Example: Checkpoints(folder.checkpoints, keep_last=2).latest()"""

    def __init__(self, folder: Path, *, keep_last: int) -> None:
        self._folder = folder
        self._keep_last = keep_last

    def save(
        self,
        step: int,
        learner: Saves | Mapping[str, Saves],
        run: Mapping[str, Any],
        model: Path,
        *,
        best: bool = False,
    ) -> Saved:
        """Writes the models' state, `run` as JSON, and the weights in the format of folder `model`.
        Of several policies, it writes each one's state and adapter alone.

        Raises:
            CheckpointError: the checkpoint could not be written; earlier ones are unchanged.
        """
        final = self._folder / f"step-{step:06d}"
        partial = self._folder / f".step-{step:06d}"
        try:
            for left in self._folder.glob(".step-*"):  # by a process that was killed
                if _PARTIAL.fullmatch(left.name):
                    shutil.rmtree(left, ignore_errors=True)
            partial.mkdir(parents=True)
            for part, models in _parts(partial, learner):
                models.save_state(part / "state")
                models.save_adapter(part / "adapter")
            if not isinstance(learner, Mapping):
                (partial / "model").mkdir()
                with closing(learner.weights()) as weights:
                    whole = with_untrained(weights, model)
                    _export(as_in_source(whole, model), model, partial / "model")
            (partial / "run.json").write_text(
                json.dumps({**run, "step": step, "format": FORMAT}), encoding="utf-8"
            )
            _flush(partial)
            shutil.rmtree(final, ignore_errors=True)
            partial.rename(final)
            if best:
                replace_file(self._folder / "best", final.name)
        except CheckpointError as error:
            shutil.rmtree(partial, ignore_errors=True)
            raise CheckpointError(
                f"{final}: {error}; the earlier checkpoints are unchanged"
            ) from error
        except (OSError, RuntimeError) as error:
            shutil.rmtree(partial, ignore_errors=True)
            raise CheckpointError(
                f"{final}: could not be saved ({_why(error)}); the earlier "
                "checkpoints are unchanged: free disk space, or lower trainer.keep_last"
            ) from error
        self._prune(step)
        return Saved(final, step)

    def mark_best(self, saved: Saved, loop: Mapping[str, Any]) -> None:
        """Makes a written checkpoint the best one; `loop` is what changes of the loop's state.

        Raises:
            CheckpointError: it could not be marked.
        """
        run = self.read_run(saved)
        changed = run | {"loop": run["loop"] | loop}
        try:
            replace_file(saved.path / "run.json", json.dumps(changed))
            replace_file(self._folder / "best", saved.path.name)
        except OSError as error:
            raise CheckpointError(f"{saved.path}: could not be marked ({_why(error)})") from error

    def latest(self) -> Saved | None:
        """The newest checkpoint that is whole; None: there is none at all.

        Raises:
            CheckpointError: there are checkpoints, and none of them is whole.
        """
        found, damage = self.all(), self.damaged()
        whole = [saved for saved in found if saved not in damage]
        if found and not whole:
            raise CheckpointError(
                f"{self._folder}: no checkpoint is whole ({'; '.join(damage.values())}); restore "
                "one from a copy, or begin a new run with trainer.resume=never"
            )
        return whole[-1] if whole else None

    def damaged(self) -> dict[Saved, str]:
        """The checkpoints newer than the newest whole one, each with what is wrong with it."""
        damage: dict[Saved, str] = {}
        for saved in reversed(self.all()):
            try:
                self._check_whole(saved)
            except CheckpointError as error:
                damage[saved] = str(error)
            else:
                break
        return damage

    def _check_whole(self, saved: Saved) -> None:
        from trainer.run.state_folder import check_whole  # loads torch.distributed

        run = self._run_json(saved)
        if run.get("format", 1) != FORMAT:
            return  # `read_run` says which version wrote it
        policies = [saved.path / "policies" / name for name in run.get("policies", ())]
        for folder in policies or [saved.path]:
            check_whole(folder / "state")

    def read_run(self, saved: Saved) -> dict[str, Any]:
        """The contents of `run.json`.

        Raises:
            CheckpointError: it is not a checkpoint, or another version of the trainer wrote it.
        """
        run = self._run_json(saved)
        if (found := run.get("format", 1)) != FORMAT:
            raise CheckpointError(
                f"{saved.path}: another version of the trainer wrote this checkpoint (format "
                f"{found}; this version reads {FORMAT}); end the run with that version, or begin a "
                f"new run from its weights: model.path={saved.path / 'model'} trainer.resume=never"
            )
        return run

    @staticmethod
    def _run_json(saved: Saved) -> dict[str, Any]:
        try:
            run = json.loads((saved.path / "run.json").read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{saved.path}: is not a checkpoint ({error})") from error
        if not isinstance(run, dict):
            raise CheckpointError(f"{saved.path}: is not a checkpoint (run.json is not a mapping)")
        return run

    def load(self, saved: Saved, learner: Saves | Mapping[str, Saves]) -> None:
        """Loads the checkpoint's state into models of the same architecture.

        Raises:
            CheckpointError: it is of another architecture or another kind of optimizer.
        """
        try:
            for part, models in _parts(saved.path, learner):
                models.load_state(part / "state")
        except (RuntimeError, ValueError, KeyError, OSError) as error:
            raise CheckpointError(
                f"{saved.path}: does not fit model.path and optimizer of this configuration "
                f"({_why(error)})"
            ) from error

    def all(self) -> list[Saved]:
        """By step; a name that `save` does not give is somebody's own, and left alone."""
        found = (
            Saved(path, int(path.name.removeprefix("step-")))
            for path in self._folder.glob("step-*")
            if _NAME.fullmatch(path.name) and path.is_dir()
        )
        return sorted(found, key=lambda saved: saved.step)

    def _prune(self, step: int) -> None:
        """Deletes the checkpoints before the last ones up to this step. Later ones, from before
        which a run has been continued, are damaged or of another course."""
        best = self._folder / "best"
        kept = {best.read_text(encoding="utf-8")} if best.is_file() else set()
        found = [saved for saved in self.all() if saved.step <= step]
        for saved in found[: -self._keep_last]:
            if saved.path.name not in kept:
                _delete(saved.path)


def _delete(path: Path) -> None:
    """Deletes a checkpoint, or the link to one. What is left of it is no checkpoint, and the next
    `save` deletes it."""
    aside = path.with_name(f".{path.name}")
    try:
        if path.is_symlink():
            path.unlink()
            return
        path.rename(aside)
        shutil.rmtree(aside)
    except OSError as error:
        _log.warning("%s: the old checkpoint could not be deleted: %s", path, _why(error))


def _parts(folder: Path, learner: Saves | Mapping[str, Saves]) -> Iterator[tuple[Path, Saves]]:
    """The folder of each policy in a checkpoint, and what is saved there."""
    if not isinstance(learner, Mapping):
        yield folder, learner
        return
    for name, models in learner.items():
        yield folder / "policies" / name, models


def random_state() -> dict[str, Any]:
    """The state of every random generator that a run uses, as JSON."""
    version, words, gauss = random.getstate()
    legacy: Any = np.random.get_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {
        "python": [version, list(words), gauss],
        "numpy": [legacy[0], legacy[1].tolist(), *legacy[2:]],
        "torch": _text(torch.get_rng_state()),
        "cuda": [_text(state) for state in cuda],
    }


def restore_random_state(state: Mapping[str, Any]) -> None:
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, np.array(keys, np.uint32), *rest))
    torch.set_rng_state(_tensor(state["torch"]))
    if state["cuda"] and torch.cuda.is_available():
        here = state["cuda"][: torch.cuda.device_count()]  # the run may have had more GPUs
        torch.cuda.set_rng_state_all([_tensor(text) for text in here])


def generator_state(generator: torch.Generator) -> str:
    return _text(generator.get_state())


def restore_generator(generator: torch.Generator, text: str) -> None:
    generator.set_state(_tensor(text))


def _export(weights: Iterable[Named], model: Path, folder: Path) -> None:
    """Writes the weights in files of at most SHARD_BYTES, and copies the other files of the folder
    `model`. Only one file's weights are in memory at a time.
    """
    for pattern in _COPIED:
        for file in model.glob(pattern):
            if file.is_file() and not file.name.endswith(".index.json"):
                shutil.copy(file, folder)
    for name in _COPIED_FOLDERS:
        if (model / name).is_dir():
            shutil.copytree(model / name, folder / name)
    files: list[list[str]] = []
    total = 0
    for shard in _shards(weights):
        save_file(shard, folder / f"{len(files)}.part", metadata={"format": "pt"})
        files.append(list(shard))
        total += sum(tensor.numel() * tensor.element_size() for tensor in shard.values())
    names = [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]
    if len(files) == 1:
        names = ["model.safetensors"]
    for number, name in enumerate(names):
        (folder / f"{number}.part").rename(folder / name)
    if len(files) > 1:
        where = {key: name for name, keys in zip(names, files, strict=True) for key in keys}
        index = {"metadata": {"total_size": total}, "weight_map": where}
        (folder / "model.safetensors.index.json").write_text(
            json.dumps(index, indent=2), encoding="utf-8"
        )


def as_in_source(weights: Iterable[Named], model: Path) -> Iterator[Named]:
    """The weights in the types that they have in the checkpoint `model`, which its configuration
    names. A checkpoint that is not in safetensors has none to compare with.

    Raises:
        CheckpointError: a weight has another name or shape than all of the checkpoint's.
    """
    source: dict[str, tuple[torch.dtype, list[int]]] = {}
    for file in weight_files(model):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118 (not a mapping)
                part = opened.get_slice(name)
                source[name] = (_TYPES[part.get_dtype()], part.get_shape())
    for name, tensor in weights:
        if not source:
            yield name, tensor
            continue
        if name not in source:
            raise CheckpointError(f"{name} is not in {model}; the export would not be loadable")
        dtype, shape = source[name]
        if list(tensor.shape) != shape:
            raise CheckpointError(f"{name} has the shape {list(tensor.shape)}, in {model} {shape}")
        yield name, tensor.to(dtype)


def with_untrained(weights: Iterable[Named], model: Path) -> Iterator[Named]:
    """The weights, then the tensors of the checkpoint `model` that are not among them: its vision
    tower or its layers for speculative decoding. A second copy of a tied output layer is left out.
    """
    written = set()
    for name, tensor in weights:
        written.add(name)
        yield name, tensor
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    text = config.get("text_config") or config
    tied = text.get("tie_word_embeddings", config.get("tie_word_embeddings", False))
    for file in weight_files(model):
        with safe_open(file, "pt") as source:
            for name in source.keys():  # noqa: SIM118 (not a mapping)
                if name not in written and not (tied and name == "lm_head.weight"):
                    yield name, source.get_tensor(name)


def _shards(weights: Iterable[Named]) -> Iterator[dict[str, torch.Tensor]]:
    shard: dict[str, torch.Tensor] = {}
    size = 0
    for name, tensor in weights:
        tensor_bytes = tensor.numel() * tensor.element_size()
        if shard and size + tensor_bytes > SHARD_BYTES:
            yield shard
            shard, size = {}, 0
        shard[name] = tensor.detach().cpu().contiguous()
        size += tensor_bytes
    if shard:
        yield shard


def _why(error: BaseException) -> str:
    """The last line of the message, which is the cause if the message is a traceback."""
    said = str(error).strip().splitlines() or [type(error).__name__]
    return said[-1].strip()[:300]


def _flush(folder: Path) -> None:
    """Flushes everything below the folder to disk."""
    for path in sorted(folder.rglob("*")):
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def _text(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)


@dataclass(frozen=True, slots=True)
class MirroredCheckpoint:
    """A whole copy. Example: MirroredCheckpoint(10, "run-a-4kf8", {"run.json": 312, …})"""

    step: int
    run_id: str
    """The run that wrote it, see `RunFolder`."""
    sizes: Mapping[str, int]
    """Path of each file below the copy's folder → its size in bytes."""


class Mirror(Protocol):
    """Copies of a run's checkpoints elsewhere. Implementation: the extra `mirror`."""

    url: str

    def newest(self) -> MirroredCheckpoint | None:
        """The whole copy of the highest step; None if there is none. Raises CheckpointError."""
        ...

    def upload(self, saved: Saved, folder: RunFolder) -> None:
        """Copies a finished checkpoint of the run in `folder`. Raises CheckpointError."""
        ...

    def fetch(self, copy: MirroredCheckpoint, folder: RunFolder) -> Saved:
        """Copies a whole checkpoint, and the history of its run, into the folder of a new run.
        Raises CheckpointError."""
        ...

    def history(self, copy: MirroredCheckpoint, name: str) -> str:
        """A file of the run's folder as it was when the copy was made. Raises CheckpointError."""
        ...


def open_mirror(url: str | None, *, keep_last: int) -> Mirror | None:
    """The run's mirror (`trainer.checkpoint_mirror`); None if it has none.

    Raises:
        ConfigError: no installed file system serves the URL.
    """
    if url is None:
        return None
    mirror: Mirror = load_extra("trainer.extras.mirror:CheckpointMirror")(url, keep_last=keep_last)
    return mirror


class CheckpointUploads:
    """Copies the checkpoints of a run to its mirror, one at a time, in a thread.

    Example:
        await uploads.room(say)
        uploads.start(checkpoints.latest(), folder)
        await uploads.finish()
    """

    def __init__(self, mirror: Mirror | None = None) -> None:
        """Without a `mirror` nothing is copied."""
        self._mirror = mirror
        self._running: asyncio.Task[None] | None = None

    async def room(self, say: Callable[[str], None]) -> None:
        """Returns when the last upload has ended, before the checkpoint that it reads may be
        deleted. Its failure is a warning."""
        try:
            await self.finish()
        except CheckpointError as error:
            say(f"warning: {error}")

    def start(self, saved: Saved | None, folder: RunFolder) -> None:
        """Starts the upload; to be called after `room`."""
        if self._mirror is not None and saved is not None:
            upload = asyncio.to_thread(self._mirror.upload, saved, folder)
            self._running = asyncio.create_task(upload)

    async def finish(self) -> None:
        """Returns when the last upload has ended.

        Raises:
            CheckpointError: as `Mirror.upload`.
        """
        running, self._running = self._running, None
        if running is not None:
            await running
