"""The one configuration of a training run. Unknown keys are refused, ranges are checked before
anything starts, and every key is documented where it is defined.

`trainer.config_sources.load` builds it from a YAML file, the environment and the command line.
Sections of other rooms are those rooms' own models: `optimizer`, `algorithm`, the launchers'.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from agent_loop.credit import CreditSettings
from agent_loop.launchers.command import CommandSettings
from agent_loop.launchers.harbor import HarborSettings
from agent_loop.launchers.http import HttpSettings
from agent_loop.launchers.python import PythonSettings
from agent_loop.rewards.grader import GraderSettings
from agent_loop.rewards.judge import JudgeSettings
from agent_loop.rewards.verifier import VerifierSettings
from agent_loop.swarm.batching import SwarmSettings
from trainer.algorithms.config import AlgorithmConfig
from trainer.policy.model import ModelConfig
from trainer.policy.optimizer import OptimizerConfig
from trainer.weight_sync.transports import Backend

RewardName = Literal["verifier", "grader", "judge", "posted"]
Port = Annotated[int, Field(ge=0, le=65535)]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class DataConfig(Section):
    train_files: tuple[Path, ...] = ()
    """Files of tasks to train on: JSONL, one object per line, or Parquet, one task per row."""
    val_files: tuple[Path, ...] = ()
    """The same of held-out tasks, for evaluation only."""
    train_harbor_dir: tuple[Path, ...] = ()
    """Folders of Harbor task folders to train on."""
    val_harbor_dir: tuple[Path, ...] = ()
    """Folders of held-out Harbor task folders."""
    harbor_dataset_dirs: tuple[Path, ...] = ()
    """More folders in which a task's folder is looked for by its `instance_id`."""
    harbor_cache_dir: Path | None = None
    """Where Harbor datasets are kept as Parquet, by content; None: read the folders each time."""
    harbor_overwrite: bool = False
    """Write that cache anew."""
    harbor_data_source: str = ""
    """The source's name for Harbor tasks; empty: the folder's name."""
    harbor_ability: str = "agent"
    """The `ability` column of that cache."""
    harbor_train_limit: int | None = Field(None, ge=1)
    """The first so many tasks of each training folder; None: all."""
    harbor_val_limit: int | None = Field(None, ge=1)
    """The first so many tasks of each folder; None: all."""
    weights: dict[str, float] = Field(default_factory=dict)
    """How often tasks of a source (a file's name without its ending) are drawn; default 1."""
    shuffle: bool = True
    """Draw each epoch of a source in another order."""
    seed: int = 0
    """Of the order of tasks."""

    @field_validator("train_harbor_dir", "val_harbor_dir", "harbor_dataset_dirs", mode="before")
    @classmethod
    def _one_or_more(cls, value: Any) -> Any:
        """One folder, or several in a list or separated as in PATH."""
        return tuple(filter(None, value.split(":"))) if isinstance(value, str) else value

    @property
    def harbor_roots(self) -> tuple[Path, ...]:
        return (*self.train_harbor_dir, *self.val_harbor_dir, *self.harbor_dataset_dirs)


class EngineConfig(Section):
    urls: tuple[str, ...] = ()
    """vLLM servers that run already, in development mode; none: start `replicas` of our own."""
    replicas: int = Field(1, ge=1)
    """Servers that we start, each with the whole model."""
    dtype: Literal["float32", "bfloat16", "auto"] = "auto"
    """`auto`: as `model.compute_dtype`. Another one is a mismatch at every token."""
    max_context_tokens: int | None = Field(None, ge=2)
    """Prompt and answer of one call together; None: the checkpoint's own limit."""
    max_sequences: int | None = Field(None, ge=1)
    """That one replica samples at a time; None: vLLM's default."""
    kv_cache_gib: int | None = Field(None, ge=1)
    """Memory for keys and values per replica on CPU; None: 1."""
    gpu_memory_share: float | None = Field(None, gt=0, le=1)
    """Of the GPU, per replica; the trainer needs the rest when colocated. None: vLLM's default."""
    args: tuple[str, ...] = ()
    """Further arguments of vLLM's server, such as `["--tensor-parallel-size", "2"]`."""
    env: dict[str, str] = Field(default_factory=dict)
    """Environment of vLLM's server, over our own."""
    start_timeout_s: float = Field(600.0, gt=0)
    """For a server to load the model and answer."""
    sleep: bool = False
    """Mode `colocated`, on GPUs: engines free their memory while the trainer uses it (vLLM's sleep
    mode)."""
    restarts: int = Field(3, ge=0)
    """How often a server of our own that ended is replaced, each, over the run; only with our own
    proxy. The new one gets the weights before it gets calls."""
    weight_transfer: Backend = "shm"
    """How weights travel: `shm` on one machine, `ipc` or `nccl` between GPUs."""
    verify: bool = True
    """After each update compare the engine's log-probabilities with the trainer's on a probe."""
    verify_tolerance: float = Field(0.0, ge=0)
    """Largest mean |Δ log p|; 0: 1e-3 in float32; in bfloat16 2e-2 on sampled tokens and 0.1 on the
    probe, whose tokens are improbable (vLLM itself is 0.035 from float32 on the quickstart's)."""


class ProxyServerConfig(Section):
    url: str | None = None
    """A proxy that runs already (its admin key in AGENTIC_PROXY_ADMIN_KEY); none: start one. Its
    engines, which get the weights, go in `engine.urls`: who started them keeps them running."""
    host: str = "127.0.0.1"
    """Where our own proxy listens."""
    port: Port = 0
    """0: a free one."""
    llm_proxy_ip: str | None = None
    """The address that agents on other machines reach the proxy by."""
    renderer: str = "auto"
    """How messages become tokens: a renderer's name, `template`, or `auto`."""
    template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the chat template, such as `enable_thinking`."""
    profile: str = "default"
    """The agent profile: what is scrubbed, matched, kept."""
    patience_s: float = Field(60.0, ge=0)
    """How long the proxy may be away at the end of a trial: it is being restarted."""
    start_timeout_s: float = Field(60.0, gt=0)
    """For our own proxy to answer."""


class RemoteAgentConfig(HarborSettings):
    """The agent: one of `command`, `python`, `http`, or (by `agent_name` or `agent_import_path`)
    an agent of Harbor."""

    command: CommandSettings | None = None
    """A program: `command.argv` starts it, its environment tells it the rest."""
    python: PythonSettings | None = None
    """A Python function, `python.target`, in a process of its own."""
    http: HttpSettings | None = None
    """A service that runs agents, at `http.url`."""
    verifier: VerifierSettings | None = None
    """Reward from a program, run in the trial's working directory after the agent has ended."""
    grader: GraderSettings | None = None
    """Reward from a Python function."""
    judge: JudgeSettings | None = None
    """Reward from a model."""
    posted_rewards: bool = False
    """Reward as it was posted to the session (`POST /sessions/{id}/rewards`)."""
    reward_weights: dict[RewardName, float] = Field(default_factory=dict)
    """Several sources are summed with these weights, 1 where none is given. With no source the
    reward is what the launcher knows: the function's return value, Harbor's verifier."""
    await_reward_s: float = Field(0.0, ge=0)
    """How long after its agent's end a trial waits for a reward to be posted."""
    credit: CreditSettings = CreditSettings()
    """Which turns the reward is credited to."""
    model_name: str = "policy"
    """The model name that agents are told."""
    timeout_s: float = Field(600.0, gt=0)
    """An agent's time."""
    max_retries: int = Field(1, ge=0)
    """New trials for one that failed on our side."""
    retry_base_delay: float = Field(0.0, ge=0)
    """Seconds before the first of them, doubled for each further one."""
    keep_workspaces: bool = False
    """Keep each trial's working directory; its logs stay in any case."""

    @property
    def agents(self) -> list[str]:
        """The keys that name an agent: one, or none where a swarm's clients run theirs."""
        given = [name for name in ("command", "python", "http") if getattr(self, name) is not None]
        given += [name for name in ("agent_name", "agent_import_path") if getattr(self, name)][:1]
        return given

    @model_validator(mode="after")
    def _one_launcher(self) -> Self:
        if len(self.agents) > 1:
            raise ValueError(f"several agents: remote_agent.{', remote_agent.'.join(self.agents)}")
        return self


class RolloutConfig(Section):
    temperature: float = Field(1.0, gt=0)
    """Pinned over the agent's own in training; the trainer scales its logits by the same."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Must be 1: see `top_k`."""
    top_k: int = Field(-1, ge=-1)
    """Anything but top_p=1, top_k=-1 samples another distribution than the trainer's."""
    max_tokens: int | None = Field(None, ge=1)
    """Per answer; None: what the agent asks for, within the context."""
    max_turns: int | None = Field(None, ge=1)
    """Model calls per trial; None: the proxy's own limit."""
    seeded: bool = False
    """Sampling that repeats with the run's seed; slower in large batches on a GPU."""
    groups_per_step: int = Field(8, ge=1)
    """Tasks per training step."""
    group_size: int = Field(8, ge=1)
    """Trials per task, which share a baseline."""
    concurrency: int = Field(32, ge=1)
    """Trials that run at a time."""
    max_staleness: int = Field(1, ge=0)
    """Separate only: updates that a token may be behind the weights that train on it."""
    stale: Literal["drop", "mask"] = "drop"
    """Separate only: an older group is dropped as a whole, or its old tokens are not trained."""
    over_sample: float = Field(0.0, ge=0)
    """Separate only: further groups alive, as a share of `groups_per_step`; the first to finish
    make the batch."""
    partial_rollout: bool = True
    """Separate only: trials go on across a weight update, each token with its version."""
    tail_groups: int = Field(0, ge=0)
    """Separate only: cancelled tasks are run again once there are so many; 0: dropped."""
    min_group_size: int = Field(1, ge=1)
    """A group with fewer trainable rollouts is replaced by another task's."""
    straggler_factor: float | None = Field(None, gt=1)
    """A trial is aborted after this many times its finished siblings' median time."""
    drop_uniform_groups: bool = False
    """Groups whose rewards are all equal are replaced by others (DAPO's dynamic sampling)."""
    max_resamples: int = Field(4, ge=1)
    """With `drop_uniform_groups`: at most this many times `groups_per_step` per step. As many in a
    row with fewer trainable rollouts than `min_group_size` end the run."""


class TrainerSection(Section):
    run_dir: Path = Path("runs/default")
    """Everything that the run leaves behind."""
    mode: Literal["colocated", "separate"] = "colocated"
    """`colocated`: sample, then train. `separate`: the producer never stops."""
    steps: int = Field(100, ge=1)
    """Training steps, one weight update each."""
    seed: int = 0
    """Of everything random, but the order of tasks."""
    max_wall_s: float | None = Field(None, gt=0)
    """Stop after the step that passes this."""
    device: str = "auto"
    """`cpu`, `cuda`, `cuda:1`, or `auto`: the first GPU where there is one."""
    ranks: int = Field(1, ge=1)
    """Processes that train together: weights sharded over them with FSDP2, micro-batches dealt.
    Each has a GPU of its own where there are any. Under torchrun: as many as it starts."""
    save_every: int = Field(0, ge=0)
    """Steps between checkpoints; 0: only at the end, at a stop, and at a best evaluation."""
    keep_last: int = Field(2, ge=1)
    """Checkpoints kept, besides the one with the best evaluation on schedule."""
    stop_at_success: float | None = Field(None, gt=0, le=1)
    """Stop when an evaluation on schedule reaches this."""


class ClusterConfig(Section):
    backend: Literal["local", "ray"] = "local"
    """Where engines and ranks run: processes on this machine, or actors on a Ray cluster."""
    address: str | None = None
    """Of a Ray cluster that runs, as for `ray.init`; None: one of this run's own, on this machine
    and at its own address."""
    namespace: str = "agentic-rl"
    """Ray namespace in which the actors are found by name: `engine-0`, `rank-0`, `proxy`."""
    strategy: Literal["STRICT_PACK", "PACK", "SPREAD", "STRICT_SPREAD"] = "STRICT_PACK"
    """Of the placement group. `STRICT_PACK`, one node, is what `engine.weight_transfer: shm`
    needs."""
    share_gpus: bool = False
    """Engine i and rank i share a GPU, half of it each for Ray; else each has its own."""
    engine_cpus: float = Field(1.0, ge=0)
    """Reserved for each engine."""
    engine_gpus: int | None = Field(None, ge=0)
    """Reserved for each engine, which has them all; None: 1 where the cluster has GPUs. A rank has
    one, where engines have any."""
    rank_cpus: float = Field(1.0, ge=0)
    """Reserved for each rank."""
    proxy: Literal["driver", "actor"] = "driver"
    """The proxy beside the driver and its agents, or beside engine 0 (its store is in
    `trainer.run_dir`, which that node must see)."""
    ready_timeout_s: float = Field(120.0, gt=0)
    """For the cluster to have room."""


class EvalConfig(Section):
    before: bool = True
    """Evaluate before the first step."""
    after: bool = True
    """Evaluate after the last step."""
    every: int = Field(0, ge=0)
    """Steps between evaluations; 0: none in between."""
    repeats: int = Field(1, ge=1)
    """Trials per held-out task; more than 1 also gives pass@k."""
    limit: int | None = Field(None, ge=1)
    """Held-out tasks to use; None: all."""
    success_at: float = 1.0
    """A reward of at least this is a success."""


class LoggingConfig(Section):
    tensorboard: bool = True
    """Write `tensorboard/` beside `metrics.jsonl`."""
    wandb_project: str | None = None
    """Log to Weights & Biases as well (package `wandb`); a resumed run goes on in its run there."""
    mlflow_experiment: str | None = None
    """Log to MLflow as well (package `mlflow`); a resumed run goes on in its run there."""
    progress: Literal["auto", "rich", "plain", "none"] = "auto"
    """`auto`: a live display in a terminal, plain lines elsewhere."""
    report_trials: int = Field(3, ge=0)
    """Trials that the report shows in full."""


class TrainerConfig(Section):
    model: ModelConfig
    data: DataConfig = DataConfig()
    engine: EngineConfig = EngineConfig()
    proxy_server: ProxyServerConfig = ProxyServerConfig()
    remote_agent: RemoteAgentConfig = RemoteAgentConfig()
    swarm: SwarmSettings | None = None
    """Set: clients bring the tasks and run the agents (`agentic-train --swarm-server`)."""
    rollout: RolloutConfig = RolloutConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    trainer: TrainerSection = TrainerSection()
    cluster: ClusterConfig = ClusterConfig()
    eval: EvalConfig = EvalConfig()
    logging: LoggingConfig = LoggingConfig()

    @property
    def engine_dtype(self) -> str:
        return self.model.compute_dtype if self.engine.dtype == "auto" else self.engine.dtype

    @property
    def mismatch_tolerance(self) -> float:
        """Largest mean |Δ log p| between trainer and engine on tokens of the same weights."""
        return self.engine.verify_tolerance or (1e-3 if self._exact else 2e-2)

    @property
    def probe_tolerance(self) -> float:
        """The same on the probe."""
        return self.engine.verify_tolerance or (1e-3 if self._exact else 0.1)

    @property
    def _exact(self) -> bool:
        return self.model.compute_dtype == self.engine_dtype == "float32"

    @model_validator(mode="after")
    def _some_agent(self) -> Self:
        if self.swarm is None and not self.remote_agent.agents:
            raise ValueError(
                "no agent: set remote_agent.command.argv to the program that starts it, or one of "
                "remote_agent.python, http, agent_name"
            )
        return self

    @model_validator(mode="after")
    def _engines_are_the_proxys(self) -> Self:
        if self.proxy_server.url is not None and not self.engine.urls:
            raise ValueError(
                f"proxy_server.url={self.proxy_server.url}: a proxy that runs already samples from "
                "its own engines; give them in engine.urls, so that they get the weights"
            )
        return self

    @model_validator(mode="after")
    def _one_device_each(self) -> Self:
        if self.trainer.ranks > 1 and ":" in self.trainer.device:
            raise ValueError(
                f"trainer.device={self.trainer.device!r} is one device, and trainer.ranks="
                f"{self.trainer.ranks} want one each; use cuda, cpu or auto"
            )
        return self

    @model_validator(mode="after")
    def _weights_can_travel(self) -> Self:
        cluster, transfer = self.cluster, self.engine.weight_transfer
        if cluster.backend == "ray" and transfer == "shm" and cluster.strategy != "STRICT_PACK":
            raise ValueError(
                f"cluster.strategy={cluster.strategy}: engine.weight_transfer=shm is for one node; "
                "use STRICT_PACK, or nccl"
            )
        return self

    @model_validator(mode="after")
    def _sleepers_are_idle(self) -> Self:
        if self.engine.sleep and self.trainer.mode == "separate":
            raise ValueError(
                "engine.sleep: engines sample while a `separate` trainer trains; use "
                "trainer.mode=colocated"
            )
        return self

    @model_validator(mode="after")
    def _pairs_share(self) -> Self:
        ranks, replicas, gpus = self.trainer.ranks, self.engine.replicas, self.cluster.engine_gpus
        if self.cluster.share_gpus and (ranks != replicas or gpus not in (None, 1)):
            raise ValueError(
                f"cluster.share_gpus: trainer.ranks={ranks} and engine.replicas={replicas} must be "
                f"equal and cluster.engine_gpus={gpus} none or 1"
            )
        return self

    @model_validator(mode="after")
    def _one_distribution(self) -> Self:
        if self.rollout.top_p != 1 or self.rollout.top_k != -1:
            raise ValueError(
                f"rollout.top_p={self.rollout.top_p}, rollout.top_k={self.rollout.top_k}: the "
                "trainer's probabilities are those of the whole distribution; use 1 and -1 and "
                "rollout.temperature"
            )
        return self
