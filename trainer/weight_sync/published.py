"""A version of the weights, or of an adapter, as files that engines pull by themselves."""

from __future__ import annotations

from dataclasses import dataclass

from proxy.records import ServedPolicy


@dataclass(frozen=True, slots=True)
class Published:
    """A version that readers can pull.

    Example: Published("run-a/v000012-019e5c41aa07", 12, size_bytes=16_400_000_000, …)
    """

    name: str
    version: int
    size_bytes: int
    """Size of the tensors."""
    delta_bytes: int
    """Size of the files that contain the changes since the version before; 0: there are none."""
    full_bytes: int
    """Size of the files that contain all tensors; 0: there are none."""
    served: ServedPolicy | None = None
    """The version of a policy whose adapter it is; None: the engines' own weights."""
