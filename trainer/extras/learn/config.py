"""The configuration of `agentic-train learn`, a file of its own.

recorder: {policy: work, folder: runs/work, folders: [~/code/shop]}
engines: ["http://127.0.0.1:9000"]
evidence: [rating, tests, {name: kept, after_s: 86400}]
model: {path: /models/qwen3, lora: {rank: 16}}
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import Field, ValidationError, model_validator

from proxy.engines.protocol import COLDEST
from proxy.errors import ConfigurationError
from proxy.extras.learn.section import Recorder
from proxy.settings.hub import model_folder
from proxy.settings.section import Section
from proxy.settings.yaml_file import read_yaml
from trainer.algorithms import AlgorithmConfig
from trainer.cluster.config import ProcessesConfig
from trainer.errors import ConfigError
from trainer.extras.learn.evidence import SOURCES, Rating, Source
from trainer.optimizer_config import OptimizerConfig
from trainer.policy.model_config import ModelConfig
from trainer.policy.repeatable import sum_in_one_order


class Update(Section):
    """Section `update`: what an adapter is trained on."""

    sessions: int = Field(8, ge=1)
    """Number of new sessions with evidence for which an update waits."""
    good: int = Field(1, ge=0)
    """Number of good sessions among them for which it waits, too: bad ones do not say what to
    do. Twice as many sessions suffice without: they say what not to do."""
    replay: float = Field(0.5, ge=0, le=1)
    """Share of the sessions that the stable adapter has learned, which are trained again."""
    held_out: float = Field(0.2, ge=0, lt=1)
    """Share of the conversations that are never trained; a session and its branches are one."""
    max_staleness: int = Field(4, ge=0)
    """Generations between the adapter that sampled a token and the one that is updated; older
    tokens are context."""
    epochs: int = Field(4, ge=1)
    """Optimizer steps of an update, each on all of its sessions."""
    bad: float = Field(0.3, ge=0)
    """Weight of bad evidence in the loss. All of it together weighs at most this share of the good
    evidence: where most is bad, it would only take the policy away from everything it does."""
    kl: float = Field(0.02, ge=0)
    """Weight of the KL divergence to the base in the loss, in which turns weigh 1 on average."""


class Canary(Section):
    """Section `canary`: how a new adapter is compared with the stable one."""

    share: float = Field(0.5, gt=0, lt=1)
    """Share of the new sessions that it serves."""
    alpha: float = Field(0.05, gt=0, lt=1)
    """Probability with which an adapter is promoted that is not better, at most; the same for one
    that is rolled back as worse, and is not."""
    max_sessions: int = Field(80, ge=1)
    """Judged sessions, of both adapters together, after which an undecided canary is rolled
    back."""
    gives_way: bool = True
    """Whether a canary ends undecided for an adapter that has learned from `update.sessions` more,
    if as many judged sessions say little of it: the evidence that it is better, and the evidence
    that it is worse, are both below 1/√alpha."""


class Gates(Section):
    """Section `gates`: what an adapter must fulfil before it serves anybody."""

    max_kl: float = Field(0.3, gt=0)
    """Mean KL divergence to the base, in nats per token."""
    min_entropy: float = Field(0.1, ge=0, le=1)
    """Mean entropy per token, as a share of that before the update."""
    max_loss_rise: float = Field(0.05, ge=0)
    """Rise of the mean -log p of held-out answers with good evidence, in nats per token."""
    least_gain: float = -0.01
    """Gain on held-out evidence: the mean of value times the rise of log p, in nats per token."""
    least_held_out: int = Field(3, ge=1)
    """Number of held-out sessions below which the two gates above do not apply."""
    max_mismatch: float = Field(0.05, gt=0)
    """Mean |Δ log p| between the record and the trainer, on tokens that the parent sampled."""


class LearnConfig(Section):
    """Example: LearnConfig(model={"path": "/models/qwen3"}, engines=["http://127.0.0.1:9000"])"""

    recorder: Recorder = Recorder()
    url: str = "http://127.0.0.1:8000"
    """The recorder's address."""
    engines: tuple[str, ...] = Field(min_length=1)
    """Addresses of the vLLM servers that the recorder uses, which read `recorder.folder` under the
    same path."""
    evidence: tuple[Annotated[Source, SOURCES], ...] = (Rating(),)
    """Sources of evidence, by name."""
    poll_s: float = Field(10.0, gt=0)
    """Seconds between two looks at the record."""
    temperature: float = Field(1.0, ge=COLDEST)
    """Temperature of what is trained; turns that were sampled at another one are context."""
    update: Update = Update()
    canary: Canary = Canary()
    gates: Gates = Gates()
    model: ModelConfig
    """The base, and `lora`, the form of the adapters."""
    optimizer: OptimizerConfig = OptimizerConfig(lr=1e-4, schedule="linear", min_lr_ratio=0.1)
    """Its schedule is that of each update."""
    device: str = "auto"
    seed: int = Field(0, ge=0, lt=2**31)

    @model_validator(mode="before")
    @classmethod
    def _as_adapter(cls, values: Any) -> Any:
        """Adapters are served by name; the name is the recorder's."""
        if not isinstance(values, Mapping) or not isinstance(values.get("model"), Mapping):
            return values
        lora = {**(values["model"].get("lora") or {}), "update": "adapter"}
        return {**values, "model": {**values["model"], "lora": lora}}

    @property
    def folder(self) -> Path:
        return self.recorder.folder

    @property
    def reads_images(self) -> bool:
        """Whether sessions with images are learned from."""
        return self.model.vision != "text"

    @property
    def processes(self) -> ProcessesConfig:
        """The sections of the trainer's ranks."""
        module = "trainer.extras.learn.algorithm"
        algorithm = {
            "advantage": {"name": f"{module}:AsGiven"},
            "loss": {"name": f"{module}:Topr"},
            "prox": "behaviour",
            "correction": {"weight": None},
            "kl": {"coefficient": self.update.kl, "estimator": "k3"},
            "epochs": self.update.epochs,
        }
        return ProcessesConfig(
            model=self.model,
            optimizer=self.optimizer,
            algorithm=AlgorithmConfig.model_validate(algorithm),
            trainer={
                "deterministic": True,
                "steps": 1,  # the schedule of the learning rate is that of one update
                "device": self.device,
                "seed": self.seed,
                "run_dir": self.folder,
            },
            rollout={"temperature": self.temperature},
            engine={"urls": self.engines},
        )


def read_config(path: Path) -> LearnConfig:
    """The configuration in the file.

    Raises:
        ConfigError: names each wrong key.
    """
    sum_in_one_order()
    try:
        config = LearnConfig.model_validate(read_yaml(path) or {})
        folder = model_folder(config.model.path)
    except OSError as error:
        raise ConfigError(f"{path}: cannot read the file: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: the file is not YAML: {error}") from error
    except ValidationError as error:
        said = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()]
        raise ConfigError(*said) from error
    except ConfigurationError as error:
        raise ConfigError(f"model.path: {error}") from error
    return config.model_copy(update={"model": config.model.at(folder)})
