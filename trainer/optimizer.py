"""The AdamW optimizer with its learning-rate schedule and its step, from one configuration.

Invariant: no step is executed with a gradient that is not finite.

A part of it is AdamW of one weight at a time, with moments in the machine's memory or weights in
bfloat16. torch computes the update, in float32, so that without either of the two it equals
`torch.optim.AdamW` bit for bit. Invariant: the moments are float32, also after they were loaded.

A weight in bfloat16 has 8 bits, and a step is smaller than a quarter of its last bit in nearly
every weight, so that rounding to the nearest would lose it. Rounding is therefore stochastic: up
with the probability of the remainder, so that the expected weight is the one in float32 (Gupta et
al., Deep Learning with Limited Numerical Precision, arXiv 1502.02551).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Optimizer
from torch.optim.adamw import adamw
from torch.optim.lr_scheduler import LambdaLR

from trainer.errors import ConfigError, TrainingError
from trainer.optimizer_config import OptimizerConfig, check_optimizer

MOMENTS = ("exp_avg", "exp_avg_sq")
LOW_BITS = 16
"""Number of bits that float32 has and bfloat16 has not."""


class OneByOneAdamW(Optimizer):
    """Example: OneByOneAdamW([{"params": […], "weight_decay": 0.1}], lr=1e-6, betas=(0.9, 0.999),
    eps=1e-8, on_host=True)"""

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        on_host: bool = False,
    ) -> None:
        """`on_host`: keep the moments in the machine's memory instead of the weights' device."""
        self._on_host = on_host
        self.found_inf: Tensor | None = None
        """A scalar on the weights' device, which the host does not read: 1, the next step changes
        nothing."""
        self._counted: list[dict[str, Tensor]] = []
        """The states whose number the last step has raised."""
        # all keys of torch's, so that either optimizer continues a checkpoint of the other
        of_torch = AdamW(
            [torch.zeros(())], lr=lr, betas=betas, eps=eps, weight_decay=0.0, fused=True
        )
        super().__init__(groups, of_torch.defaults)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self._counted = []
        for number, (group, weight) in enumerate(self._weights()):
            if weight.grad is None:
                continue
            state = self.state[weight]
            if not state:
                state["step"] = torch.zeros(())
                for name in MOMENTS:
                    state[name] = self._kept(torch.zeros_like(weight, dtype=torch.float32), weight)
            self._update(weight, group, state, number)
            self._counted.append(state)

    def take_back(self) -> None:
        """The last step had a `found_inf` of 1: it does not count."""
        for state in self._counted:
            state["step"] -= 1
        self._counted = []

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Like torch's, which would give the moments the weights' type and device, all at once."""
        saved = state_dict["state"]
        steps = {name: {"step": each["step"]} for name, each in saved.items()}
        super().load_state_dict({**state_dict, "state": steps})
        names = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        for name, (_, weight) in zip(names, self._weights(), strict=True):
            if name not in saved:
                continue
            self.state[weight]["step"] = saved[name]["step"].cpu()
            for moment in MOMENTS:
                exact = saved[name][moment].to(torch.float32)
                self.state[weight][moment] = self._kept(exact, weight)

    def _weights(self) -> Iterable[tuple[dict[str, Any], Tensor]]:
        return ((group, weight) for group in self.param_groups for weight in group["params"])

    def _kept(self, moment: Tensor, weight: Tensor) -> Tensor:
        """The moment where it stays between the steps."""
        own = _local(moment)
        if not self._on_host or _local(weight).device.type == "cpu":
            return moment.to(weight.device)
        if own.device.type == "cpu" and own.is_pinned():
            return moment
        host = _pinned(own)
        if not isinstance(moment, DTensor):
            return host
        # as FSDP2's own offload makes them
        return DTensor(host, moment._spec, requires_grad=False)  # type: ignore[no-untyped-call]

    def _update(
        self, weight: Tensor, group: dict[str, Any], state: dict[str, Tensor], number: int
    ) -> None:
        assert weight.grad is not None
        own, device = _local(weight), _local(weight).device
        kept = [_local(state[name]) for name in MOMENTS]
        first, second = (moment.to(device, non_blocking=True) for moment in kept)
        exact = own.float()  # the weight itself if it is float32
        # made there, because a copy of the host's would be waited for
        step = torch.full((), float(state["step"]), device=device)
        adamw(
            [exact], [_local(weight.grad).float()], [first], [second], [], [step],
            fused=True, found_inf=self.found_inf, amsgrad=False, maximize=False, lr=group["lr"],
            beta1=group["betas"][0], beta2=group["betas"][1], weight_decay=group["weight_decay"],
            eps=group["eps"],
        )  # fmt: skip
        state["step"] += 1
        if own.dtype == torch.bfloat16:
            seed = int(state["step"]) << 20 | number
            own.copy_(rounded(exact, torch.Generator(device).manual_seed(seed)))
        for moment, updated in zip(kept, (first, second), strict=True):
            if moment is not updated:
                moment.copy_(updated, non_blocking=True)


def rounded(exact: Tensor, generator: torch.Generator) -> Tensor:
    """float32 → bfloat16, up or down at random, such that the expected value is `exact`."""
    noise = torch.randint(
        1 << LOW_BITS, exact.shape, dtype=torch.int32, device=exact.device, generator=generator
    )
    bits = exact.view(torch.int32).add_(noise).bitwise_and_(-1 << LOW_BITS)
    return bits.view(torch.float32).to(torch.bfloat16)


def _pinned(tensor: Tensor) -> Tensor:
    """A copy in the machine's memory, at an address that the GPU can read."""
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor)


def _local(tensor: Tensor) -> Tensor:
    """This rank's part."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class GradientError(TrainingError):
    """The gradient of a step is not finite."""


Clip = Callable[[nn.Module, float], Tensor]
"""Clips the gradient of a model to a norm; returns the norm that it had."""


class Unread(Protocol):
    """What the passes of an optimizer step report, which is still on the device."""

    def all_finite(self, finite: Tensor) -> Tensor:
        """Whether this scalar is True and all losses are finite; not read."""
        ...

    def sums(self, more: Mapping[str, Tensor] | None = None) -> dict[str, float]:
        """Reads the sum of each metric, and `more` scalars. Raises an error if a loss is not
        finite."""
        ...


class Stepper:
    """The optimizer and schedule of one model."""

    def __init__(
        self,
        model: nn.Module,
        config: OptimizerConfig,
        total_steps: int | None,
        clip: Clip | None = None,
        *,
        saves_names: bool = False,
    ) -> None:
        """`clip`: for models whose ranks hold different layers or experts, of which torch's own
        function would not know the whole norm. `saves_names`: for models of which several ranks
        have a part whole, so that they group the weights otherwise than one rank.

        Raises ConfigError if a schedule needs `total_steps`, or if a library is missing.
        """
        self.model = model
        self._clip = clip or _clip
        # the checkpoint names each weight, so that ranks may hold or group different ones
        self._saved = StateDictOptions(flatten_optimizer_state_dict=clip is not None or saves_names)
        self.max_grad_norm = config.max_grad_norm
        self.optimizer = _build_optimizer(model, config)
        self.schedule = _build_schedule(self.optimizer, config, total_steps)
        own = [weight for group in self.optimizer.param_groups for weight in group["params"]]
        self._skips = type(self.optimizer) in (AdamW, OneByOneAdamW) and all(
            weight.is_cuda and not isinstance(weight, DTensor) for weight in own
        )
        """Whether the optimizer itself changes nothing if it is told so by `found_inf`."""
        if any(weight.is_cuda for weight in model.parameters()):
            # At the first step, they would lie in memory that the passes have freed, none of which
            # could then be given back to an engine on the same GPU.
            self._make_moments()

    def step(self, late: Unread | None = None) -> dict[str, float]:
        """Clips the gradient, updates the weights, clears the gradient. Returns the metrics of
        `late`, which are read together with the gradient's norm, the norm and the learning rate.

        Raises GradientError if the gradient is not finite, and what `late` raises if a loss is not;
        the weights are unchanged then.
        """
        norm = self._clip(self.model, self.max_grad_norm)
        finite = torch.isfinite(norm)
        if late is not None:
            finite = late.all_finite(finite)
        lr = self.optimizer.param_groups[0]["lr"]
        if self._skips:  # by its kernel, for which the host does not wait
            self.optimizer.found_inf = (~finite).float()  # type: ignore[attr-defined]
        if self._skips or finite:
            self.optimizer.step()
        # Reading the norm waits for the step, so that weights and moments are complete for what
        # reads them next: other streams, and the host.
        changed = False
        try:
            found = {"grad_norm": float(norm)} if late is None else late.sums({"grad_norm": norm})
            changed = math.isfinite(found["grad_norm"])
        finally:
            self.clear()
            if self._skips and not changed and isinstance(self.optimizer, OneByOneAdamW):
                self.optimizer.take_back()
        if not changed:
            norm_is = f"the gradient's norm is {found['grad_norm']}"
            raise GradientError(f"{norm_is}; the weights are unchanged")
        self.schedule.step()
        return found | {"lr": float(lr)}

    def begin_schedule(self) -> None:
        """The learning rate is that of the schedule's first step; the moments stay."""
        self.schedule.last_epoch = 0
        self._set_rates()

    def _set_rates(self) -> None:
        """The learning rates of the schedule's current step."""
        ratio = self.schedule.lr_lambdas[0](self.schedule.last_epoch)
        for group, rate in zip(self.optimizer.param_groups, self.schedule.base_lrs, strict=True):
            group["lr"] = rate * ratio

    def clear(self) -> None:
        """Discards the gradient."""
        self.optimizer.zero_grad(set_to_none=True)

    def gradient_is_finite(self) -> bool:
        """Whether every gradient is finite."""
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        return all(bool(torch.isfinite(gradient).all()) for gradient in gradients)

    def state_dict(self) -> dict[str, Any]:
        """Weights, moments and schedule by parameter name, as torch's DCP saves them."""
        if not self.optimizer.state:
            self._make_moments()
        model, optimizer = get_state_dict(self.model, self.optimizer, options=self._saved)
        return {"model": model, "optimizer": optimizer, "schedule": self.schedule.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from what `state_dict` returned, with the settings of this configuration."""
        groups, rates = self.optimizer.param_groups, self.schedule.base_lrs
        settings = [{key: each[key] for key in each if key != "params"} for each in groups]
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
            options=self._saved,
        )
        self.schedule.load_state_dict(state["schedule"])
        self.schedule.base_lrs = rates
        for group, own in zip(self.optimizer.param_groups, settings, strict=True):
            group.update(own)
        self._set_rates()

    def _make_moments(self) -> None:
        """Makes the moments of a model that was not trained yet. torch makes them by an empty step,
        which must not count: the first update would be a quarter smaller."""
        get_state_dict(self.model, self.optimizer, options=self._saved)
        for state in self.optimizer.state.values():
            step = state["step"]
            state["step"] = torch.zeros_like(step) if isinstance(step, Tensor) else 0


def _clip(model: nn.Module, max_norm: float) -> Tensor:
    """Clips sharded weights and those that each rank has whole, which count once, to one norm."""
    kinds: dict[bool, list[nn.Parameter]] = defaultdict(list)
    for weight in model.parameters():
        if weight.grad is not None:
            kinds[isinstance(weight, DTensor)].append(weight)
    norms = [_norm(weights) for weights in kinds.values()] or [torch.zeros(())]
    norm = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
    for weights in kinds.values():
        torch.nn.utils.clip_grads_with_norm_(weights, max_norm, norm)
    return norm


def _norm(weights: Iterable[nn.Parameter]) -> Tensor:
    norm = torch.nn.utils.get_total_norm([each.grad for each in weights if each.grad is not None])
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def _build_optimizer(model: nn.Module, config: OptimizerConfig) -> Optimizer:
    by_kind: dict[Any, list[nn.Parameter]] = defaultdict(list)
    for parameter in model.parameters():
        if parameter.requires_grad:
            mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
            by_kind[parameter.ndim <= 1, mesh].append(parameter)
    # torch's fused step takes weights on one mesh at a time
    groups: list[dict[str, object]] = [
        {"params": parameters, "weight_decay": 0.0 if is_vector else config.weight_decay}
        for (is_vector, _), parameters in sorted(by_kind.items(), key=lambda kind: kind[0][0])
    ]
    if config.name == "adamw_8bit":
        return _adamw_8bit(groups, config)
    rounds = any(weight.dtype == torch.bfloat16 for each in by_kind.values() for weight in each)
    if rounds or config.offload:
        return OneByOneAdamW(
            groups, lr=config.lr, betas=config.betas, eps=config.eps, on_host=config.offload
        )
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)


def _adamw_8bit(groups: Iterable[dict[str, object]], config: OptimizerConfig) -> Optimizer:
    check_optimizer(config)
    from bitsandbytes.optim import AdamW8bit

    optimizer: Optimizer = AdamW8bit(groups, lr=config.lr, betas=config.betas, eps=config.eps)
    return optimizer


def _build_schedule(
    optimizer: Optimizer, config: OptimizerConfig, total_steps: int | None
) -> LambdaLR:
    if config.schedule != "constant" and total_steps is None:
        raise ConfigError(
            f"optimizer.schedule={config.schedule} needs the number of training steps"
        )

    def ratio(step: int) -> float:
        if step < config.warmup_steps:
            return (step + 1) / (config.warmup_steps + 1)
        if total_steps is None or config.schedule == "constant":
            return 1.0
        span = max(1, total_steps - 1 - config.warmup_steps)
        left = max(0.0, 1.0 - (step - config.warmup_steps) / span)
        shape = left if config.schedule == "linear" else (1 - math.cos(math.pi * left)) / 2
        return config.min_lr_ratio + (1 - config.min_lr_ratio) * shape

    return LambdaLR(optimizer, ratio)
