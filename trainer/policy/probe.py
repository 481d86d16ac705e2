"""A fixed sequence on which trainer and engine are compared after each weight update."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from agent_loop.records import Group, Rollout, RolloutStatus, Segment, Task
from proxy.records import Ids
from trainer.batch import Batch, build_batch
from trainer.errors import ConfigError
from trainer.policy.learner import Scorer

PROBE_TOKENS = 256  # enough to pass through every layer at many positions; milliseconds to score


def probe_ids(model: Path, text: str) -> Ids:
    """The text as the checkpoint's tokenizer cuts it, at most PROBE_TOKENS.

    Raises:
        ConfigError: the checkpoint has no tokenizer.
    """
    file = model / "tokenizer.json"
    if not file.is_file():
        raise ConfigError(f"model.path: {model} holds no tokenizer.json; the proxy needs it too")
    ids = Tokenizer.from_file(str(file)).encode(text, add_special_tokens=False).ids[:PROBE_TOKENS]
    return np.array(ids if len(ids) > 1 else [0, 0], np.int32)


def score_ids(model: Scorer, ids: Sequence[int] | Ids) -> list[float]:
    """log p(ids[t] | ids[:t]) at temperature 1 for t = 1 … T-1."""
    return model.compute_logprobs(
        _as_batch(np.asarray(ids, np.int32)), temperature=1.0
    ).logprobs.tolist()


def _as_batch(ids: Ids) -> Batch:
    count = len(ids)
    mask = np.arange(count) > 0
    zeros = np.zeros(count, np.int32)
    segment = Segment(-1, ids, mask, zeros.astype(np.float32), zeros, zeros)
    task = Task("probe", {})
    rollout = Rollout("probe", task, RolloutStatus.DONE, 0.0, segments=(segment,))
    return build_batch([Group("probe", task, [rollout])])
