"""Copies from the machine's memory to a GPU and back, for which the host waits as rarely as it can.

Invariant: a copy to a GPU is ordered before what its stream does next, and the host goes on: a
wait would leave the GPU without work until the next kernel is launched.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on that device. CUDA copies memory that is not pinned before it goes on, and only
    after all that was launched before."""
    if device.type != "cuda" or tensor.device.type != "cpu":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def read(rows: Sequence[Mapping[str, Tensor]]) -> list[dict[str, float]]:
    """The numbers of all scalars, by one copy."""
    scalars = [value.detach().double() for row in rows for value in row.values()]
    values = iter(torch.stack(scalars).tolist() if scalars else ())
    return [{name: next(values) for name in row} for row in rows]
