"""`Learner`: the public steps of training, as rank 0 executes them.

    trained_batch ─▶ compute_logprobs ─▶ compute_ref_logprobs ─▶ compute_values
                ─▶ compute_advantages ─▶ update ─▶ sync_weights ─▶ save

`trainer.fit` calls these steps in order for a run, `trainer.mains.low_level` for a loop of yours.
Every method blocks until all ranks have executed the step.

Invariant: exactly the sampled tokens are trained. `compute_logprobs` ends the run if trainer and
engine give different probabilities to tokens that the current weights sampled.
"""

from __future__ import annotations

import resource
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from proxy.records import ServedPolicy
from proxy.settings.late_section import load_extra
from trainer.algorithms.aggregation import Aggregation
from trainer.algorithms.token_loss import Metrics
from trainer.batch import Batch
from trainer.checkpoint import (
    Checkpoints,
    generator_state,
    random_state,
    restore_generator,
    restore_random_state,
)
from trainer.errors import TrainingError, WeightSyncError
from trainer.learning import steps
from trainer.learning.models import (
    FreeCache,
    Models,
    RestoreAdapter,
    UseRandomAdapter,
)
from trainer.policy.adapter import adapter_config
from trainer.policy.flops import training_flops, utilisation
from trainer.ranks_config import RanksConfig
from trainer.run.rollout_metrics import mismatch_metrics
from trainer.weight_sync.adapters import AdapterSync
from trainer.weight_sync.control import EngineControl
from trainer.weight_sync.dtypes import Report
from trainer.weight_sync.probe import probe_batch
from trainer.weight_sync.published import Published
from trainer.weight_sync.segment import Named
from trainer.weight_sync.sync import WeightSync
from trainer.weight_sync.transports import LOST_S


@dataclass(frozen=True, slots=True)
class RunState:
    """The state of a run in a checkpoint, without tensors.

    Example: RunState(step=12, version=11, loop={"producer": {…}, "best": 0.8})
    """

    step: int
    version: int
    loop: dict[str, Any]
    """The training loop's own state, as JSON; empty at the beginning of a run."""


class Publishes(Protocol):
    """Publishes weights as files. Implementation: the extra `relay`."""

    def publish(self, version: int, held: Sequence[Report]) -> Published:
        """As `Learner.publish_weights`."""
        ...

    def close(self) -> None: ...


class Learner:
    """Example: a step of your own:
    batch = trained_batch(groups)
    learner.compute_logprobs(batch)
    learner.compute_advantages(batch)
    metrics = learner.update(batch) | learner.sync_weights()
    """

    def __init__(self, config: RanksConfig, models: Models, probe: Sequence[int] = ()) -> None:
        """`probe` is the text, as token ids, on which trainer and engines are compared after each
        update; with an empty probe nothing is compared."""
        self.config = config
        self.models = models
        self.algorithm = models.algorithm
        self.probe = list(probe)
        self.step = 0
        """Number of executed training steps."""
        self.version = 0
        """Version of the policy's weights, increased by 1 with every update."""
        self._generator = torch.Generator().manual_seed(config.trainer.seed)
        """Random generator that draws mini-batches."""
        self._engines: WeightSync | AdapterSync | None = None
        self._publishing: Publishes | None = None
        self._first_mismatch: float | None = None
        """Mean |Δ log p| of the first step since the start, whose engines are new."""

    def connect(self, engine_urls: Sequence[str], adapters: Path | None = None) -> None:
        """Sets the engines that receive the weights from now on, and disconnects the former
        ones. Without URLs there are none: all engines are relay workers (`publish_weights`).
        `adapters` is the folder for the versions of the LoRA adapter, which the engines read; None:
        `adapters` in `trainer.run_dir`.

        Raises:
            WeightSyncError: an engine does not serve the policy's adapters exactly.
        """
        engines = self._reached(engine_urls, adapters) if engine_urls else None
        self._disconnect()
        self._engines = engines
        if isinstance(engines, AdapterSync):
            self._check_adapters(engines)

    def compute_logprobs(self, batch: Batch) -> Metrics:
        """Sets `batch.prox_logprobs` and `batch.entropies`, those of the policy before the update,
        if the algorithm uses the first. Returns metrics that compare them with the engine's.

        Raises:
            TrainingError: trainer and engine give different probabilities to tokens that the
                current weights sampled; or the engine's routing is to be replayed and not recorded.
        """
        metrics: Metrics = {}
        if self.config.model.router_replay == "replay":
            compare = load_extra("trainer.extras.experts.routing_mismatch:routing_metrics")
            metrics = compare(self.models, batch, self.config.rollout.temperature)
        if not self.algorithm.needs_prox:
            return metrics
        temperature = self.config.rollout.temperature
        scores = steps.compute_logprobs(self.models, batch, temperature=temperature)
        metrics |= mismatch_metrics(batch, scores.logprobs, self.version)
        metrics["actor/entropy_before"] = float(scores.entropy.mean())
        if "mismatch/logp_abs_mean" in metrics:
            self._check_mismatch(metrics["mismatch/logp_abs_mean"])
        return metrics

    def compute_ref_logprobs(self, batch: Batch) -> None:
        """Sets `batch.ref_logprobs` and `batch.teacher_logprobs` if the algorithm uses them."""
        temperature = self.config.rollout.temperature
        steps.compute_ref_logprobs(self.models, batch, temperature=temperature)

    def compute_values(self, batch: Batch) -> None:
        """Sets `batch.values` if the algorithm has a critic."""
        steps.compute_values(self.models, batch)

    def compute_advantages(self, batch: Batch) -> Metrics:
        """Sets `batch.advantages`."""
        return self.algorithm.compute_advantages(batch)

    def update(self, batch: Batch) -> Metrics:
        """Executes the optimizer steps of one batch, each in as many micro-batches as the limit on
        their size requires.

        The metric `actor/update_steps` is the number of optimizer steps. It is 0, and the version
        does not change, if the algorithm trains on none of the groups, and during the critic's
        warm-up.

        Raises:
            TrainingError: a token would not be trained exactly once, a gradient is not finite, or
                the engine's probabilities differ from the trainer's.
        """
        metrics = {"actor/update_steps": 0.0} | steps.update(
            self.models,
            batch,
            temperature=self.config.rollout.temperature,
            version=self.version,
            generator=self._generator,
        )
        if not self.algorithm.needs_prox:
            metrics |= self._mismatch_in_update(batch, metrics)
        self.step += 1
        if metrics["actor/update_steps"]:
            self.version += 1
        return metrics

    def imitate(self, batch: Batch, aggregation: Aggregation) -> Metrics:
        """Executes one optimizer step towards recorded text; see `trainer.extras.sft`.

        Raises:
            TrainingError: a token would not be trained exactly once, or a gradient is not finite.
        """
        metrics = steps.imitate(self.models, batch, aggregation)
        self.step += 1
        self.version += 1
        return metrics

    def imitation_loss(self, batch: Batch) -> float:
        """Mean of `−log p` over the tokens of the batch, in nats."""
        scores = steps.compute_logprobs(self.models, batch, temperature=1.0)
        return -float(scores.logprobs.double().mean())

    def sync_weights(self) -> Metrics:
        """Sends the policy's weights to every engine and compares both on the probe.

        Raises:
            WeightSyncError: an engine refused the weights, or does not serve them.
        """
        engines = self._connected()
        if isinstance(engines, AdapterSync):
            config = adapter_config(self.models.policy.model)
            with closing(self.models.adapter()) as tensors:
                report = engines.push(tensors, config, self.version)
        else:
            with closing(self.weights()) as weights:
                report = engines.push(weights, self.version, self.models.policy.hf_shapes)
        metrics = {
            "sync/paused_s": report.paused_s,
            "sync/total_s": report.total_s,
            "sync/bytes": float(report.size_bytes),
        }
        if self.config.engine.verify and len(self.probe) > 1:
            tolerance = self.config.engine.probe_tolerance(self.config.model)
            metrics["sync/probe_abs_mean"] = engines.verify(
                self.probe, self.score(self.probe), tolerance
            )
        return metrics

    def publish_weights(self, run: str, held: Sequence[Report]) -> Published:
        """Publishes the policy's weights, or its adapter, at `engine.publish`, for relay workers.
        `run` names the run's folder there. `held` is what engines report of the types in which they
        hold weights; empty: they are published as they are trained.

        Raises:
            ConfigError: no installed file system serves the URL.
            WeightSyncError: the weights could not be written.
        """
        if self._publishing is None:
            self._publishing = load_extra("trainer.extras.relay.learner_weights:Publishing")(
                self.config,
                self.models,
                self.probe,
                run,
                steps.compute_logprobs,
                steps.base_logprobs,
            )
        assert self._publishing is not None
        return self._publishing.publish(self.version, held)

    @property
    def served(self) -> ServedPolicy | None:
        """The last version of the adapter that the engines got, which the proxy must publish; None
        if they have the trained weights."""
        engines = self._engines
        if not isinstance(engines, AdapterSync) or not engines.served_name:
            return None
        return ServedPolicy(self.config.model.policy, self.version, engines.served_name)

    def score(self, ids: Sequence[int]) -> list[float]:
        """log p(ids[t] | ids[:t]) at temperature 1 for t = 1 … T-1, under the current weights."""
        scores = steps.compute_logprobs(self.models, probe_batch(ids), temperature=1.0)
        return scores.logprobs.tolist()

    def weights(self) -> Generator[Named]:
        """The policy's weights by their names in a Hugging Face checkpoint; see `Models`."""
        return self.models.weights()

    def save(self, checkpoints: Checkpoints, loop: dict[str, Any], *, best: bool = False) -> None:
        """Writes a checkpoint of this step; `loop` is your loop's own state, which must be JSON.

        Raises:
            CheckpointError: the checkpoint could not be written; earlier ones are unchanged.
        """
        state = self.state | {"random": random_state(), "loop": loop}
        model = self.config.model.path
        checkpoints.save(self.step, self.models, state, model, best=best)

    def restore(self, checkpoints: Checkpoints) -> RunState:
        """Loads the last checkpoint. Without a checkpoint, returns the state of a new run.

        Raises:
            CheckpointError: the checkpoint is of another architecture or another optimizer.
        """
        saved = checkpoints.latest()
        if saved is None:
            return RunState(self.step, self.version, {})
        checkpoints.load(saved, self.models)
        state = checkpoints.read_run(saved)
        self.continue_from(state)
        restore_random_state(state["random"])
        return RunState(self.step, self.version, state["loop"])

    @property
    def state(self) -> dict[str, Any]:
        """Its state in a checkpoint besides that of the models, as JSON."""
        return {
            "step": self.step,
            "version": self.version,
            "generator": generator_state(self._generator),
        }

    def continue_from(self, state: Mapping[str, Any]) -> None:
        """Continues from a `state`."""
        self.step, self.version = int(state["step"]), int(state["version"])
        restore_generator(self._generator, state["generator"])

    @contextmanager
    def engines_asleep(self) -> Iterator[None]:
        """A context in which the engines have freed their GPU memory, if `engine.sleep` is set.

        Raises:
            WeightSyncError: an engine that is alive did not fall asleep or did not wake up.
        """
        if not self.config.engine.sleep or self._engines is None:
            yield
            return
        control = self._connected().control
        with _unless_dead(control):
            control.sleep()
        try:
            yield
        finally:
            self.free_cache()
            with _unless_dead(control):
                control.wake_up()

    def free_cache(self) -> None:
        """Gives memory that no tensor uses back to the GPUs of all ranks."""
        self.models.together(FreeCache())

    def speed(self, batch: Batch, seconds: float) -> Metrics:
        """Throughput and memory of a step that took `seconds` on this rank."""
        metrics = {
            "throughput/input_tokens_per_s": batch.input_tokens / seconds,
            "memory/peak_gib": _peak_gib(),
        }
        forward = 1 / 3 if self.algorithm.needs_prox else 0.0
        passes = self.algorithm.config.epochs + forward
        policy = self.models.policy
        flops = training_flops(policy.model.config, policy.multiplied_weights, batch, passes=passes)
        share = utilisation(flops, seconds, policy.device, policy.ranks.size)
        return metrics if share is None else metrics | {"throughput/mfu": share}

    def close(self) -> None:
        """Disconnects from the engines, and ends publishing."""
        self._disconnect()
        if self._publishing is not None:
            self._publishing.close()
            self._publishing = None

    def _disconnect(self) -> None:
        if self._engines is not None:
            self._engines.close()
            self._engines = None

    def _reached(self, urls: Sequence[str], adapters: Path | None) -> WeightSync | AdapterSync:
        control, policy = EngineControl(urls), self.config.model.policy
        if not policy:
            device = self.models.policy.device
            try:
                tower = self.config.model.vision == "trained"
                transfer = self.config.engine.weight_transfer
                return WeightSync(control, transfer, device, tower=tower)
            except BaseException:
                control.close()
                raise
        folder = adapters or self.config.trainer.run_dir / "adapters"
        return AdapterSync(control, folder, policy)

    def _check_adapters(self, engines: AdapterSync) -> None:
        """Compares trainer and engines on a random adapter, before anything is sampled."""
        if not self.config.engine.verify or len(self.probe) < 2:
            return
        self.models.together(UseRandomAdapter())
        config = adapter_config(self.models.policy.model)
        tolerance = self.config.engine.probe_tolerance(self.config.model)
        try:
            scores = self.score(self.probe)
            with closing(self.models.adapter()) as tensors:
                engines.try_out(tensors, config, self.probe, scores, tolerance)
        except WeightSyncError as error:
            raise WeightSyncError(
                f"the engine does not serve this policy's adapters: {error}; set "
                "model.lora.update=merged, or choose other model.lora.target_modules"
            ) from error
        finally:
            self.models.together(RestoreAdapter())

    def _connected(self) -> WeightSync | AdapterSync:
        if self._engines is None:
            raise TrainingError("the trainer has no engines yet: call connect(engine_urls) first")
        return self._engines

    def _mismatch_in_update(self, batch: Batch, metrics: Metrics) -> Metrics:
        """Compares trainer and engine in the update's own forward pass, which is exact for one
        optimizer step."""
        if metrics["actor/update_steps"] != 1 or "actor/logp_abs_diff" not in metrics:
            return {}
        mean = metrics["actor/logp_abs_diff"]
        if not bool((batch.versions == self.version).all()):
            return {"mismatch/all_abs_mean": mean}
        self._check_mismatch(mean)
        return {"mismatch/all_abs_mean": mean, "mismatch/logp_abs_mean": mean}

    def _check_mismatch(self, mean: float) -> None:
        engine, model = self.config.engine, self.config.model
        tolerance = engine.mismatch_tolerance(model, self._first_mismatch)
        if mean > tolerance:
            advice = "check engine.dtype and rollout.temperature"
            if tolerance < engine.mismatch_tolerance(model):
                advice = (
                    f"the first step differed by {self._first_mismatch:.1e}, so a part of what the "
                    "engines hold is not of these weights, such as cached keys and values; start "
                    "the engines anew and resume the run"
                )
            raise TrainingError(
                f"step {self.step + 1}: trainer and engine differ by mean |Δ log p| = {mean:.2e} "
                f"on the same weights, but at most {tolerance:.0e} is expected; "
                f"{advice}, or raise engine.verify_tolerance"
            )
        if self._first_mismatch is None:
            self._first_mismatch = mean


@contextmanager
def _unless_dead(control: EngineControl) -> Iterator[None]:
    """Suppresses the error of an engine that has ended: `trainer.cluster.engines` replaces it."""
    try:
        yield
    except WeightSyncError:
        if control.lost_in_update(LOST_S) is None:
            raise


def _peak_gib() -> float:
    """Peak memory of this process in GiB: on the GPU if it trains on one, else of the host."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
