"""Checkpoints: everything that a run needs to continue as if it had not been interrupted.

    checkpoints/step-000010/
        state/          weights, moments, schedules, as torch's DCP writes them
        run.json        step, version, states of random generators, state of the loop
        model/          the same weights as a Hugging Face checkpoint, with the tokenizer
        adapter/        with `model.lora`: the adapter in PEFT's format
        policies/NAME/  with `trainer.policies`: `state/` and `adapter/` of each policy, in place of
                        the folders above

Invariant: a folder named `step-…` is complete: it is written under another name, flushed to disk
and then renamed. A save that fails (disk full) leaves the earlier checkpoints untouched.
"""

from __future__ import annotations

import base64
import json
import os
import random
import shutil
import warnings
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as load_distributed
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed

from proxy.run_files.files import replace_file
from trainer.errors import CheckpointError
from trainer.weight_sync.segment import Named

FORMAT = 2
"""Number of the layout of `run.json` and `state/`. Release 0.1.0 wrote another layout, without this
number."""
SHARD_BYTES = 4 << 30
"""Maximum size of a file of the Hugging Face export."""
_COPIED = ("*.json", "*.jinja", "*.txt", "*.model")
"""Patterns of the files of a checkpoint folder that are not weights: configuration, tokenizer, chat
template."""


@dataclass(frozen=True, slots=True)
class Saved:
    """Example: Saved(Path("runs/a/checkpoints/step-000010"), step=10)"""

    path: Path
    step: int


class Saves(Protocol):
    """An object with weights and state to save. Implementation: `trainer.models.Models`."""

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
                shutil.rmtree(left, ignore_errors=True)
            partial.mkdir(parents=True)
            for part, models in _parts(partial, learner):
                models.save_state(part / "state")
                models.save_adapter(part / "adapter")
            if not isinstance(learner, Mapping):
                (partial / "model").mkdir()
                with closing(learner.weights()) as weights:
                    _export(with_untrained(weights, model), model, partial / "model")
            (partial / "run.json").write_text(json.dumps({**run, "step": step, "format": FORMAT}))
            _flush(partial)
            shutil.rmtree(final, ignore_errors=True)
            partial.rename(final)
            if best:
                replace_file(self._folder / "best", final.name)
        except (OSError, RuntimeError, CheckpointException) as error:
            shutil.rmtree(partial, ignore_errors=True)
            raise CheckpointError(
                f"{final}: could not be saved ({_why(error)}); the earlier "
                "checkpoints are unchanged: free disk space, or lower trainer.keep_last"
            ) from error
        self._prune()
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
        saved = self._all()
        return saved[-1] if saved else None

    def read_run(self, saved: Saved) -> dict[str, Any]:
        """The contents of `run.json`.

        Raises:
            CheckpointError: it is not a checkpoint, or another version of the trainer wrote it.
        """
        try:
            run: dict[str, Any] = json.loads((saved.path / "run.json").read_text())
        except (OSError, json.JSONDecodeError) as error:
            raise CheckpointError(f"{saved.path}: is not a checkpoint ({error})") from error
        if (found := run.get("format", 1)) != FORMAT:
            raise CheckpointError(
                f"{saved.path}: another version of the trainer wrote this checkpoint (format "
                f"{found}; this version reads {FORMAT}); end the run with that version, or begin a "
                f"new run from its weights: model.path={saved.path / 'model'} trainer.resume=never"
            )
        return run

    def load(self, saved: Saved, learner: Saves | Mapping[str, Saves]) -> None:
        """Loads the checkpoint's state into models of the same architecture.

        Raises:
            CheckpointError: it is of another architecture or another kind of optimizer.
        """
        try:
            for part, models in _parts(saved.path, learner):
                models.load_state(part / "state")
        except (CheckpointException, RuntimeError, ValueError, KeyError, OSError) as error:
            raise CheckpointError(
                f"{saved.path}: does not fit model.path and optimizer of this configuration "
                f"({_why(error)})"
            ) from error

    def _all(self) -> list[Saved]:
        return sorted(
            (
                Saved(path, int(path.name.removeprefix("step-")))
                for path in self._folder.glob("step-*")
            ),
            key=lambda saved: saved.step,
        )

    def _prune(self) -> None:
        best = self._folder / "best"
        kept = {best.read_text()} if best.is_file() else set()
        for saved in self._all()[: -self._keep_last]:
            if saved.path.name not in kept:
                shutil.rmtree(saved.path)


def _parts(folder: Path, learner: Saves | Mapping[str, Saves]) -> Iterator[tuple[Path, Saves]]:
    """The folder of each policy in a checkpoint, and what is saved there."""
    if not isinstance(learner, Mapping):
        yield folder, learner
        return
    for name, models in learner.items():
        yield folder / "policies" / name, models


def write_state(state: Mapping[str, Any], folder: Path) -> None:
    """Writes the state with torch's DCP: each rank writes its shards. All ranks call this
    together."""
    with _one_process_is_meant():
        save_distributed(dict(state), checkpoint_id=folder)


def read_state(state: dict[str, Any], folder: Path) -> None:
    """Overwrites the tensors of `state`; all ranks call this together."""
    with _one_process_is_meant():
        load_distributed(state, checkpoint_id=folder)


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
            if not file.name.endswith(".index.json"):
                shutil.copy(file, folder)
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
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def with_untrained(weights: Iterable[Named], model: Path) -> Iterator[Named]:
    """The weights, then the tensors of the checkpoint `model` that are not among them: its vision
    tower or its layers for speculative decoding. A second copy of a tied output layer is left out.
    """
    written = set()
    for name, tensor in weights:
        written.add(name)
        yield name, tensor
    config = json.loads((model / "config.json").read_text())
    text = config.get("text_config") or config
    tied = text.get("tie_word_embeddings", config.get("tie_word_embeddings", False))
    for file in sorted(model.glob("*.safetensors")):
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


@contextmanager
def _one_process_is_meant() -> Iterator[None]:
    """Suppresses DCP's warning that there is no process group."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield


def _text(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
