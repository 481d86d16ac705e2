"""The models of one rank of the trainer, and the steps that all ranks execute together.

`Models` holds only the models that the algorithm needs: the policy and, depending on the algorithm,
a critic, a reference and a teacher. Rank 0 leads: `Models.together(step)` sends the step to the
other ranks, which `follow`, and executes it, too; `Models.deal(steps)` sends each rank its own
step. A step is a small frozen dataclass, and its method `on` is its only handler. The steps that
compute a batch are in `trainer.learning.steps`.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from proxy.settings.late_section import load_extra
from trainer.algorithms import Algorithm, AlgorithmConfig
from trainer.batch import Batch, BatchPart
from trainer.learning.model_checks import (
    check_models,
)
from trainer.learning.teacher import EngineTeacher
from trainer.optimizer_config import OptimizerConfig
from trainer.policy.adapter import RandomAdapter, adapter_config, save_adapter
from trainer.policy.critic import Critic
from trainer.policy.model_config import ModelConfig
from trainer.policy.parallel import Ranks
from trainer.policy.policy import Policy
from trainer.policy.scores import Scores
from trainer.policy.trainable import TrainablePolicy
from trainer.run.state_folder import StateError, read_state, write_state
from trainer.weight_sync.segment import Named

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class FrozenModel(Protocol):
    """A model that scores recorded tokens and is not trained."""

    def parts(self, batch: Batch) -> list[BatchPart]:
        """The batch, divided into one part for each rank."""
        ...

    def compute_logprobs(self, batch: Batch, *, temperature: float) -> Scores: ...


class CollectiveStep(Protocol[T_co]):
    """A computation that every rank executes on its own models at the same time."""

    def on(self, models: Models) -> T_co: ...


@dataclass(frozen=True, slots=True)
class AdaptersOff:
    """A frozen model with the initial weights of a LoRA policy, which needs no copy of them."""

    policy: TrainablePolicy

    def parts(self, batch: Batch) -> list[BatchPart]:
        return self.policy.parts(batch)

    def compute_logprobs(self, batch: Batch, *, temperature: float) -> Scores:
        with self.policy.adapters_off():
            return self.policy.compute_logprobs(batch, temperature=temperature, replay=False)


@dataclass(slots=True)
class Models:
    """Example:
    models = build_models(ModelConfig(path=…), OptimizerConfig(), AlgorithmConfig(preset="ppo"))
    scores = compute_logprobs(models, batch, temperature=1.0)  # of `trainer.learning.steps`
    """

    policy: TrainablePolicy
    algorithm: Algorithm
    critic: Critic | None = None
    reference: FrozenModel | None = None
    teacher: FrozenModel | None = None
    updates: int = 0
    """Number of batches trained on; counted on rank 0."""
    random_adapter: RandomAdapter | None = None
    """Set while the policy has a random adapter, by which engines are tested."""

    def together(self, step: CollectiveStep[T]) -> T:
        """Executes the step on every rank; to be called on rank 0 only. Returns rank 0's result."""
        return self.deal([step] * self.policy.ranks.size)

    def deal(self, steps: Sequence[CollectiveStep[T]]) -> T:
        """As `together`, but each rank receives and executes its own step, `steps[rank]`."""
        self.policy.ranks.deal(steps)
        return steps[0].on(self)

    def weights(self) -> Generator[Named]:
        """`(name, tensor)` as in a Hugging Face checkpoint, gathered one by one from all ranks.

        If you stop early, close the generator before the next step, because the other ranks gather
        every weight in any case.
        """
        return self._gathered(GatherWeights())

    def adapter(self) -> Generator[Named]:
        """As `weights`: the policy's LoRA adapter, in PEFT's format."""
        return self._gathered(GatherWeights(adapter=True))

    def _gathered(self, gather: GatherWeights) -> Generator[Named]:
        self.policy.ranks.tell(gather)
        named = gather.of(self)
        try:
            for each in named:  # noqa: UP028 (`yield from` would close `named` with this generator)
                yield each
        finally:
            for _ in named:
                pass

    def save_adapter(self, folder: Path) -> None:
        """Writes the policy's LoRA adapter in PEFT's format; nothing if it has none."""
        if self.policy.config.lora is not None:
            with contextlib.closing(self.adapter()) as tensors:
                save_adapter(tensors, adapter_config(self.policy.model), folder)

    def finish(self) -> None:
        """Ends `follow` on the other ranks."""
        self.policy.ranks.tell(Finish())

    def save_state(self, folder: Path) -> None:
        """Writes `state_dict` to the folder, each rank its own shards."""
        self.together(SaveState(folder, self.updates, self.algorithm.state_dict()))

    def load_state(self, folder: Path) -> None:
        """Reads what `save_state` wrote, possibly with another number of ranks."""
        self.together(LoadState(folder))

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next step depends on except the frozen models, for torch's DCP."""
        state: dict[str, Any] = {
            "policy": self.policy.state_dict(),
            "algorithm": self.algorithm.state_dict(),
            "steps": self.updates,
        }
        return state if self.critic is None else state | {"critic": self.critic.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.policy.load_state_dict(state["policy"])
        self.algorithm.load_state_dict(state["algorithm"])
        self.updates = int(state["steps"])
        if self.critic is not None:
            self.critic.load_state_dict(state["critic"])


@dataclass(frozen=True, slots=True)
class GatherWeights:
    """The other ranks' part in `Models.weights` and `Models.adapter`."""

    adapter: bool = False

    def of(self, models: Models) -> Iterator[Named]:
        policy = models.policy
        return policy.adapter() if self.adapter else policy.named_hf_parameters()

    def on(self, models: Models) -> None:
        for _ in self.of(models):
            pass


@dataclass(frozen=True, slots=True)
class FreeCache:
    """Gives memory that the allocator keeps for later steps back to the GPU, on which an engine
    is about to start or to wake up: vLLM ends if less is free than it was promised."""

    def on(self, models: Models) -> None:
        if models.policy.device.type == "cuda":
            gc.collect()  # tensors in cycles
            torch.cuda.empty_cache()


@dataclass(frozen=True, slots=True)
class UseRandomAdapter:
    """Replaces the policy's adapter by a random one until `RestoreAdapter`."""

    def on(self, models: Models) -> None:
        models.random_adapter = RandomAdapter(models.policy.model)
        models.random_adapter.enter()


@dataclass(frozen=True, slots=True)
class RestoreAdapter:
    """Ends `UseRandomAdapter`."""

    def on(self, models: Models) -> None:
        if models.random_adapter is not None:
            models.random_adapter.leave()
            models.random_adapter = None


@dataclass(frozen=True, slots=True)
class SaveState:
    """Writes the state of all ranks to the folder."""

    folder: Path
    updates: int
    """As `Models.updates` on rank 0."""
    algorithm: dict[str, Any]
    """The algorithm's state on rank 0, which leads the updates."""

    def on(self, models: Models) -> None:
        # torch's DCP may take a value that is no tensor from any of the ranks.
        models.updates = self.updates
        models.algorithm.load_state_dict(self.algorithm)
        write_state(models.state_dict(), self.folder)


@dataclass(frozen=True, slots=True)
class LoadState:
    """Reads the state of all ranks from the folder."""

    folder: Path

    def on(self, models: Models) -> None:
        state = models.state_dict()
        read_state(state, self.folder)
        models.load_state_dict(state)


@dataclass(frozen=True, slots=True)
class Finish:
    """The last message that a rank receives."""


def follow(models: Models) -> None:
    """Executes each step that rank 0 sends, until `Finish`."""
    while not isinstance(step := models.policy.ranks.hear(), Finish):
        # If a save fails, it fails on every rank; rank 0 reports it.
        with contextlib.suppress(StateError):
            step.on(models)


def build_models(
    model: ModelConfig,
    optimizer: OptimizerConfig,
    algorithm: AlgorithmConfig,
    *,
    device: str | torch.device = "cpu",
    ranks: Ranks | None = None,
    batches: int | None = None,
    weights_of: TrainablePolicy | None = None,
) -> Models:
    """Loads the models that the algorithm needs onto `device`. The policy shares the frozen weights
    of `weights_of`, if that is given.

    `batches` is the number of batches of the run, which learning-rate schedules need. With several
    `ranks`, each rank builds its own models, and then all ranks except rank 0 `follow`.

    Raises:
        ConfigError: as `check_models`.
    """
    ranks = ranks or Ranks()
    check_models(model, algorithm, ranks.parallelism)
    per_batch = algorithm.epochs * algorithm.mini_batches
    total_steps = own_steps = None
    if batches is not None:
        warmup = 0 if algorithm.critic is None else algorithm.critic.warmup_steps
        total_steps = batches * per_batch
        own_steps = max(0, batches - warmup) * per_batch  # of the policy
    policy = _policy(model, optimizer, device, ranks, own_steps, weights_of)
    models = Models(policy, Algorithm(algorithm))

    def frozen(path: Path) -> TrainablePolicy:
        return _policy(model.model_copy(update={"path": path, "lora": None}), None, device, ranks)

    if algorithm.critic is not None:
        settings = model.model_copy(update={"path": algorithm.critic.path or model.path})
        models.critic = Critic(
            settings,
            algorithm.critic.optimizer,
            device=device,
            ranks=ranks,
            total_steps=total_steps,
        )
    if algorithm.kl is not None:
        if algorithm.kl.reference is None and model.lora is not None:
            models.reference = AdaptersOff(policy)
        else:
            models.reference = frozen(algorithm.kl.reference or model.path)
    if algorithm.distillation is not None:
        teacher, url = algorithm.distillation.checkpoint, algorithm.distillation.engine_url
        if url is not None:
            models.teacher = EngineTeacher(url, policy.ranks, algorithm.distillation.concurrency)
        elif teacher is not None:
            models.teacher = frozen(teacher)
    return models


def _policy(
    model: ModelConfig,
    optimizer: OptimizerConfig | None,
    device: str | torch.device,
    ranks: Ranks,
    total_steps: int | None = None,
    weights_of: TrainablePolicy | None = None,
) -> TrainablePolicy:
    if ranks.parallelism.divides_model:
        divided: TrainablePolicy = load_extra("trainer.extras.automodel.policy:AutomodelPolicy")(
            model, optimizer, device=device, ranks=ranks, total_steps=total_steps
        )
        return divided
    return Policy(
        model,
        optimizer,
        device=device,
        ranks=ranks,
        total_steps=total_steps,
        weights_of=weights_of,
    )
