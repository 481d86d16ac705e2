"""The probe: a fixed text on which trainer and engines are compared after each weight update."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from agent_loop.records import Group, Rollout, RolloutStatus, Segment, Task
from proxy.records import Ids
from trainer.batch import Batch, build_batch
from trainer.errors import ConfigError

PROBE_TOKENS = 256  # tests every layer at many positions, and takes milliseconds to score


def probe_ids(model: Path, text: str) -> Ids:
    """The first PROBE_TOKENS tokens of the text, by the checkpoint's tokenizer.

    Raises:
        ConfigError: the checkpoint has no tokenizer.
    """
    file = model / "tokenizer.json"
    if not file.is_file():
        raise ConfigError(
            f"model.path: {model} holds no tokenizer.json; give the folder of a checkpoint with "
            "its tokenizer, which the proxy needs, too"
        )
    ids = Tokenizer.from_file(str(file)).encode(text, add_special_tokens=False).ids[:PROBE_TOKENS]
    return np.array(ids if len(ids) > 1 else [0, 0], np.int32)


def probe_batch(ids: Sequence[int] | Ids) -> Batch:
    """A batch of one sequence in which every token but the first is scored."""
    count = len(ids)
    mask = np.arange(count) > 0
    zeros = np.zeros(count, np.int32)
    tokens = np.asarray(ids, np.int32)
    segment = Segment(-1, tokens, mask, zeros.astype(np.float32), zeros, zeros)
    task = Task("probe", {})
    rollout = Rollout("probe", task, RolloutStatus.DONE, 0.0, segments=(segment,))
    return build_batch([Group("probe", task, [rollout])])
