"""In which type each weight is sent: that in which the engines hold it, if they all agree.

An engine that serves bfloat16 rounds weights that it receives in float32, and float32 is twice the
bytes. Some tensors it holds in float32 all the same (routers, `A_log`), so only the engine knows:
each of its workers reports what its loader does with each weight (`vllm_dtypes.py`).

Invariant: an engine holds the same bits as if it had received the trained weights. A weight is
therefore rounded only if every worker that loads it copies it, into the same type, and does nothing
else with it. What no engine reports is sent as it is trained.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch

from trainer.weight_sync.control import EngineControl
from trainer.weight_sync.segment import Named

Dtypes = Mapping[str, torch.dtype]
"""Name of a weight → the type in which it is sent, of those that are not sent as trained."""
Report = Sequence[str | None]
"""The type in which a worker holds each weight, in the order of the question; None: it does not
load this weight. Example: ["bfloat16", "float32", None]"""

_ROUNDED = (torch.bfloat16, torch.float16)
"""Types to which weights are rounded; smaller ones come with scales."""

_log = logging.getLogger(__name__)


def engine_dtypes(control: EngineControl, shapes: Sequence[Named]) -> dict[str, torch.dtype]:
    """Asks every worker of every engine. `shapes` are the trained weights without contents.

    An engine that cannot report, or reports an error, receives the weights as they are trained, and
    so do the others.

    Raises:
        WeightSyncError: an engine does not answer.
    """
    described = [(name, dtype_name(each.dtype), list(each.shape)) for name, each in shapes]
    reports = control.held_dtypes(json.dumps(described))
    for report in reports:
        if not isinstance(report, list) or len(report) != len(shapes):
            _log.warning(
                "weights are sent as they are trained, because an engine does not report the types "
                "in which it holds them: %s",
                report,
            )
            return {}
    return agreed(shapes, reports)


def agreed(shapes: Sequence[Named], reports: Sequence[Report]) -> dict[str, torch.dtype]:
    """The weights that all reports that hold them hold in the same, narrower type.

    Example: agreed([("w", a float32 tensor)], [["bfloat16"], [None]]) is {"w": torch.bfloat16}.
    """
    chosen = {}
    for (name, tensor), *held in zip(shapes, *reports, strict=True):
        types = {getattr(torch, each) for each in held if each is not None}
        narrower = [each for each in _ROUNDED if each.itemsize < tensor.dtype.itemsize]
        if tensor.is_floating_point() and len(types) == 1 and (dtype := types.pop()) in narrower:
            chosen[name] = dtype
    return chosen


def rounded(weights: Iterable[Named], dtypes: Dtypes) -> Iterator[Named]:
    """The weights in the types in which they are sent, each rounded to the nearest, ties to
    even, as the engine would."""
    for name, tensor in weights:
        yield name, tensor.to(dtypes.get(name, tensor.dtype))


def dtype_name(dtype: torch.dtype) -> str:
    """Example: dtype_name(torch.bfloat16) is "bfloat16"."""
    return str(dtype).removeprefix("torch.")
