"""The probe: a fixed text on which trainer and engines are compared after each weight update."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from agent_loop.records import Group, Rollout, RolloutStatus, Segment, Task
from proxy.records import Ids
from proxy.rendering.tokenizer import load_tokenizer
from trainer.batch import Batch, build_batch
from trainer.errors import ConfigError

PROBE_TOKENS = 256  # tests every layer at many positions, and takes milliseconds to score


def probe_ids(model: Path, text: str) -> Ids:
    """The first PROBE_TOKENS tokens of the text, by the checkpoint's tokenizer, after its token for
    the beginning of a text if it has one. Without it, models that were trained with it give the
    text an improbable continuation and large activations: Gemma 3 then differs in bfloat16 from
    itself in float32 by twice as much.

    Raises:
        ConfigError: the checkpoint has no tokenizer.
        ConfigurationError: its tokenizer cannot be read.
    """
    file = model / "tokenizer.json"
    if not file.is_file():
        raise ConfigError(
            f"model.path: {model} holds no tokenizer.json; give the folder of a checkpoint with "
            "its tokenizer, which the proxy needs, too"
        )
    tokenizer = load_tokenizer(model)
    begin = tokenizer.special_tokens.get("bos_token", "")
    ids = tokenizer.encode(begin + text)[:PROBE_TOKENS]
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
