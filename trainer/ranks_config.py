"""The sections of the configuration that the ranks of the trainer read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from agent_loop.producers.rollout_config import RolloutConfig
from proxy.engines.vllm_server import VllmConfig
from proxy.settings.section import Common, Section
from trainer.algorithms import AlgorithmConfig
from trainer.engine import EnginesConfig
from trainer.optimizer_config import OptimizerConfig
from trainer.policy.model_config import LoraSettings, ModelConfig
from trainer.policy.parallelism import Parallelism


class PolicySection(Section):
    """One policy of a run that has several. Example: PolicySection(frozen=True)"""

    frozen: bool = False
    """Serve the policy, and do not train it: it keeps the adapter that it begins with."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """The keys of the section `optimizer` that this policy has different values for."""
    lora: LoraSettings = LoraSettings()
    """The keys of `model.lora` that this policy has different values for: `rank`, `alpha` and
    `target_modules`."""


class TrainerSection(Section):
    """Section `trainer`. Example: TrainerSection(steps=200, save_every=10)"""

    run_dir: Common[Path] = Path("runs/default")
    """Folder for everything that the run writes."""
    mode: Common[Literal["colocated", "separate"]] = "colocated"
    """`colocated`: sample and train in turn. `separate`: sample and train at the same time."""
    steps: Common[int] = Field(100, ge=1)
    """Number of training steps, each with at most one update of the engines' weights."""
    seed: int = Field(0, ge=0, lt=2**31)
    """Seed of all random choices except the order of tasks."""
    deterministic: bool = False
    """Repeat to the bit: each call is sampled with its own random numbers (`rollout.seeded`), and
    no sum of the trainer depends on the number of threads. The run records its batches and a ledger
    of every trained token, from which `agentic-train replay` computes the same weights
    (docs/check_us.md)."""
    max_wall_s: float | None = Field(None, gt=0)
    """Seconds after which the run ends, at the end of a step; None: no limit."""
    device: str = "auto"
    """`cpu`, `cuda`, `cuda:1`, or `auto`: the first GPU if there is one, else the CPU."""
    ranks: Common[int] = Field(1, ge=1)
    """Number of processes that train together: weights are sharded over them with FSDP2, and
    micro-batches are divided among them. Each has its own GPU if there are GPUs. Under torchrun,
    this must be the number of processes that torchrun starts."""
    context_parallel: int = Field(1, ge=1)
    """Number of ranks that compute each micro-batch together, each a part of its tokens, for
    sequences whose activations are too large for one GPU (docs/scale.md). It divides `ranks` and
    the model's numbers of attention heads."""
    tensor_parallel: int = Field(1, ge=1)
    """Number of ranks that hold each a part of every matrix and compute each micro-batch together.
    Any of the three keys above 1 trains with NeMo Automodel (docs/scale.md)."""
    pipeline_parallel: int = Field(1, ge=1)
    """Number of ranks that hold each a part of the layers, through which the micro-batches pass."""
    expert_parallel: int = Field(1, ge=1)
    """Number of ranks that hold each a part of the experts of a mixture of experts. Each trains
    micro-batches of its own; they exchange tokens."""
    weight_copies: int = Field(1, ge=1)
    """Number of copies of weights, moments and gradients, each sharded over as many consecutive
    ranks (HSDP). With one copy per machine, only gradients travel between machines. It divides
    `ranks`."""
    save_every: Common[int] = Field(10, ge=0)
    """Number of steps between checkpoints; 0: no checkpoints by steps. A checkpoint is always
    written at the end, when the run is stopped, and after the best evaluation so far."""
    save_every_s: float = Field(600.0, ge=0)
    """Seconds between checkpoints, which are written at the end of a step; 0: no checkpoints by
    time."""
    keep_last: int = Field(2, ge=1)
    """Number of checkpoints to keep, in addition to the one with the best scheduled evaluation."""
    checkpoint_mirror: str | None = None
    """URL of a folder to which each checkpoint is copied, of any file system that fsspec knows:
    `s3://bucket/run-a`, `file:///mnt/nfs/run-a`. A start on an empty disk continues from the newest
    whole copy. Each run has its own folder (docs/scale.md)."""
    stop_at_success: float | None = Field(None, gt=0, le=1)
    """Success rate of a scheduled evaluation at which the run ends; None: never."""
    no_signal_steps: int = Field(10, ge=0)
    """Number of consecutive steps without a signal after which the run ends with an error; 0:
    never. In a step without a signal, every advantage is 0 because rewards do not differ."""
    preflight_s: float = Field(60.0, ge=0)
    """Seconds for which the first trial runs alone, before the first evaluation and batch: if it
    fails, and another task's, too, the run ends there. A trial that takes longer is ended, and the
    run begins; 0: none."""
    resume: str = "auto"
    """Whether a start continues an earlier run. `auto`: continue the last run in `run_dir` if it
    has not ended and has the same configuration, else begin a new run in `run_dir`, `run_dir-2`, …;
    `never`: begin a new run; a folder: continue the run in that folder with this configuration."""
    policies: Mapping[str, PolicySection] = Field(default_factory=dict)
    """Several policies by name, which are trained at the same time from the same trials, each with
    an adapter and an optimizer of its own (docs/adapters.md). `remote_agent.policies` maps model
    names to them; all other names are `model.lora.policy`. Empty: one policy is trained."""

    @property
    def parallelism(self) -> Parallelism:
        """How the ranks divide a micro-batch among them."""
        return Parallelism(
            self.context_parallel,
            self.tensor_parallel,
            self.pipeline_parallel,
            self.expert_parallel,
            self.weight_copies,
        )


class RanksConfig(Section):
    """The sections that the ranks of the trainer read."""

    model: ModelConfig
    engine: EnginesConfig = EnginesConfig()
    rollout: RolloutConfig = RolloutConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    trainer: TrainerSection = TrainerSection()

    @model_validator(mode="before")
    @classmethod
    def _policies_have_every_key(cls, values: Any) -> Any:
        """Gives each of `trainer.policies` the run's own values for the keys that it leaves out."""
        if not isinstance(values, Mapping) or not isinstance(values.get("trainer"), Mapping):
            return values
        policies = values["trainer"].get("policies")
        if not isinstance(policies, Mapping) or not all(
            each is None or isinstance(each, Mapping) for each in policies.values()
        ):
            return values
        whole = {name: _with_every_key(name, each or {}, values) for name, each in policies.items()}
        return {**values, "trainer": {**values["trainer"], "policies": whole}}

    @property
    def trained_policies(self) -> tuple[str, ...]:
        """The policies that are trained, by name; "" if they are the engines' own weights."""
        policies = self.trainer.policies
        if not policies:
            return (self.model.policy,)
        return tuple(name for name, section in policies.items() if not section.frozen)

    @property
    def served_judges(self) -> Mapping[str, VllmConfig]:
        """The servers of judges that the run starts, by the key of the judge."""
        return {}

    @property
    def engine_adapters(self) -> tuple[int, int]:
        """The highest rank of the adapters that an engine samples with, and how many at a time;
        (0, 0): it samples with none."""
        engine, lora = self.engine, self.model.lora
        if lora is None or not self.model.policy:
            return (engine.lora_rank, engine.lora_slots) if engine.lora_rank else (0, 0)
        ranks = [section.lora.rank for section in self.trainer.policies.values()] or [lora.rank]
        # during an update, two of each
        return engine.lora_rank or max(ranks), max(engine.lora_slots, 2 * len(ranks))

    def of_policy(self, name: str) -> Self:
        """The sections of one of `trainer.policies`, as of a run that has only this one."""
        section = self.trainer.policies[name]
        model = self.model.model_copy(update={"lora": section.lora})
        return self.model_copy(update={"model": model, "optimizer": section.optimizer})


def _with_every_key(
    name: str, section: Mapping[str, Any], values: Mapping[str, Any]
) -> dict[str, Any]:
    model, optimizer = values.get("model"), values.get("optimizer")
    lora = model.get("lora") if isinstance(model, Mapping) else None
    whole = dict(section)
    for key, shared in (("optimizer", optimizer), ("lora", lora)):
        own = section.get(key, {})
        if isinstance(own, Mapping) and isinstance(shared or {}, Mapping):
            whole[key] = {**(shared or {}), **({"policy": name} if key == "lora" else {}), **own}
    return whole
