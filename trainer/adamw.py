"""AdamW of one weight at a time, with moments in the machine's memory or weights in bfloat16.

torch computes the update, in float32, so that without either of the two it equals
`torch.optim.AdamW` bit for bit. Invariant: the moments are float32, also after they were loaded.

A weight in bfloat16 has 8 bits, and a step is smaller than a quarter of its last bit in nearly
every weight, so that rounding to the nearest would lose it. Rounding is therefore stochastic: up
with the probability of the remainder, so that the expected weight is the one in float32 (Gupta et
al., Deep Learning with Limited Numerical Precision, arXiv 1502.02551).
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Optimizer
from torch.optim.adamw import adamw

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
        # all keys of torch's, so that either optimizer continues a checkpoint of the other
        of_torch = AdamW(
            [torch.zeros(())], lr=lr, betas=betas, eps=eps, weight_decay=0.0, fused=True
        )
        super().__init__(groups, of_torch.defaults)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for number, (group, weight) in enumerate(self._weights()):
            if weight.grad is None:
                continue
            state = self.state[weight]
            if not state:
                state["step"] = torch.zeros(())
                for name in MOMENTS:
                    state[name] = self._kept(torch.zeros_like(weight, dtype=torch.float32), weight)
            self._update(weight, group, state, number)

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
        step = state["step"].to(device)
        adamw(
            [exact], [_local(weight.grad).float()], [first], [second], [], [step],
            fused=True, amsgrad=False, maximize=False, lr=group["lr"], beta1=group["betas"][0],
            beta2=group["betas"][1], weight_decay=group["weight_decay"], eps=group["eps"],
        )  # fmt: skip
        state["step"].copy_(step)
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
