"""Section `optimizer`."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Annotated, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from proxy.settings.section import Common, Settings
from trainer.errors import ConfigError

MIN_LR = 1e-12
"""Smallest learning rate: the last bit of a float32 weight of 1e-5. Less would train nothing."""
MAX_RATE = 1e3
"""Largest learning rate and weight decay."""
MIN_EPS = 1e-15
"""With a constant that float32 does not hold, a weight without a gradient would become 0 / 0. The
squares of small gradients underflow before their mean does, which this constant outweighs."""
Beta = Annotated[float, Field(ge=0, lt=1)]


class OptimizerConfig(Settings):
    """Section `optimizer`."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    name: Literal["adamw", "adamw_8bit"] = "adamw"
    """Name of the optimizer; `adamw_8bit` needs bitsandbytes (extra `gpu`) and one rank."""
    lr: Common[float] = Field(1e-6, ge=MIN_LR, le=MAX_RATE)
    """Peak learning rate."""
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    """Decay rates of the running means of the gradient and of its square."""
    eps: float = Field(1e-8, ge=MIN_EPS, le=1e3)
    """Constant that is added to the root of the squared gradient's mean to avoid division by 0."""
    weight_decay: float = Field(0.0, ge=0, le=MAX_RATE)
    """Decay rate of the weights; applied to matrices only, not to norms and biases."""
    schedule: Common[Literal["constant", "linear", "cosine"]] = "constant"
    """Shape of the learning rate after the warm-up; `linear` and `cosine` reach `min_lr_ratio` at
    the last step."""
    warmup_steps: Common[int] = Field(0, ge=0)
    """Number of optimizer steps over which the learning rate rises linearly from 0."""
    min_lr_ratio: float = Field(0.0, ge=0, le=1)
    """Final learning rate divided by the peak, for `linear` and `cosine`."""
    offload: Common[bool] = False
    """Keep the moments in the machine's memory. Those of one weight after another move to the GPU
    for the step and back, which takes about 16 bytes of traffic per weight and step."""
    max_grad_norm: Common[float] = Field(1.0, gt=0)
    """Maximum global norm of the gradient; a larger gradient is scaled down to it."""

    @model_validator(mode="after")
    def _moves_weights(self) -> Self:
        largest = self.lr * self.max_grad_norm / (self.max_grad_norm + self.eps)
        if largest < MIN_LR / 2:
            raise ValueError(
                f"max_grad_norm={self.max_grad_norm:g} with eps={self.eps:g} and lr={self.lr:g}: a "
                f"step changes no weight by more than {largest:.0e}, which trains nothing; use a "
                "larger max_grad_norm or a smaller eps"
            )
        return self


def check_optimizer(config: OptimizerConfig, key: str = "optimizer") -> None:
    """Raises ConfigError if a library is missing. `key`: where the section is."""
    if config.name == "adamw_8bit" and find_spec("bitsandbytes") is None:
        raise ConfigError(
            f"{key}.name=adamw_8bit needs the package bitsandbytes; install it "
            "(`pip install bitsandbytes`), or use adamw"
        )
