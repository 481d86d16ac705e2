"""What the tokens of long conversations cost the trainer, from record to packed pass, by turn.

The proxy's rooms are measured by `python -m benchmarks.proxy --parts turns`. Here is the rest of a
step: the record as bytes and back, the tree of its segments, the batch, its packing, and the passes
of training with attention left out. `first` and `last` are what EXTRA turns add to a conversation
of 2 turns, and to one that has 98 with them. Processor time, the least of the repeats. Memory that
is freed stays with the process, so that a large array does not cost its pages anew.

The second table has GROUPS x GROUP sessions with one first prompt: the time per session, beside
sessions with a short prompt, and what it takes to copy and compare the bytes of its tokens.
"""

from __future__ import annotations

import argparse
import ctypes
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from transformers import AttentionInterface

from agent_loop.records import Group, Rollout, RolloutStatus, Task
from agent_loop.trajectory import build_segments
from benchmarks.train.__main__ import save_model
from proxy.records import (
    FinishReason,
    Session,
    SessionKind,
    SessionStatus,
    Turn,
    TurnStatus,
    VersionSpan,
)
from proxy.records.binary import decode_record, encode_record
from trainer.algorithms.token_loss import TokenLoss
from trainer.batch import Batch, build_batch
from trainer.optimizer_config import OptimizerConfig
from trainer.policy.model_config import ModelConfig
from trainer.policy.policy import Policy
from trainer.policy.scorer import ATTENTION
from trainer.rows.packing import MicroBatch
from trainer.rows.prefix_tree import divide, lay_out

TURNS, EXTRA = (2, 98), 24
TURN_TOKENS, ANSWER_TOKENS = 1_142, 200
"""New tokens of a turn, with its answer: 98 turns have 112k."""
GROUPS, GROUP = 8, 16
FIRST_PROMPT_TOKENS, SHORT_PROMPT_TOKENS = 18_900, 24
MICRO_BATCH_TOKENS = 4_096
VOCABULARY = 1_024

MMAP_THRESHOLD, TRIM_THRESHOLD = (-3, 1 << 25), (-1, 1 << 30)
"""Options of glibc's mallopt, and bytes."""


def session(name: str, prompt: int, turns: int, seed: int = 0) -> list[Turn]:
    """A conversation whose first turn has `prompt` tokens more; those of all sessions are equal,
    and their first answers differ."""
    found: list[Turn] = []
    rng = np.random.default_rng(0)
    for index in range(turns):
        size = TURN_TOKENS - ANSWER_TOKENS + (0 if index else prompt)
        ids = rng.integers(0, VOCABULARY, size).astype(np.int32)
        answer = rng.integers(0, VOCABULARY, ANSWER_TOKENS).astype(np.int32)
        answer[0] = seed
        found.append(
            Turn(
                session_id=name,
                index=index,
                parent=index - 1 if index else None,
                shared_tokens=found[-1].path_tokens if index else 0,
                fork_cause=None,
                prompt_ids=ids,
                request_key=b"%d" % index,
                sampling={},
                sampled_ids=answer,
                logprobs=np.full(ANSWER_TOKENS, -7, np.float32),
                versions=(VersionSpan(0, 0, ANSWER_TOKENS),),
                finish_reason=FinishReason.STOP,
                status=TurnStatus.DONE,
            )
        )
    return found


def read(records: Sequence[Sequence[Turn]]) -> list[list[Turn]]:
    """The sessions as bytes, and from them."""
    found = []
    for turns in records:
        of = Session(turns[0].session_id, b"", SessionKind.TRAIN, SessionStatus.COMPLETED, 0.0, 1.0)
        found.append(decode_record(encode_record(of, list(turns)))[1])
    return found


def rollouts(records: Sequence[Sequence[Turn]]) -> list[Group]:
    """One group of all sessions."""
    task = Task("task", {})
    found = [
        Rollout(
            trial_id=turns[0].session_id,
            task=task,
            status=RolloutStatus.DONE,
            reward=float(number % 2),
            segments=build_segments(turns),
        )
        for number, turns in enumerate(records)
    ]
    return [Group("task", task, found)]


def packed(batch: Batch) -> list[MicroBatch]:
    plans = divide(batch, max_tokens=MICRO_BATCH_TOKENS, share_prefixes=True, in_pieces=True)
    return lay_out(batch, plans)


def without_attention(
    _module: Any, query: Tensor, _key: Tensor, value: Tensor, *_: Any, **_others: Any
) -> tuple[Tensor, None]:
    """Each token attends to itself alone."""
    repeats = query.shape[1] // value.shape[1]
    return value.repeat_interleave(repeats, 1).transpose(1, 2).contiguous(), None


class Training:
    """The passes of a step over a batch, without the optimizer."""

    def __init__(self, folder: Path) -> None:
        save_model("tiny", folder, context=1 << 17)
        config = {"path": folder, "max_micro_batch_tokens": MICRO_BATCH_TOKENS}
        self._policy = Policy(ModelConfig.model_validate(config), OptimizerConfig(lr=1e-6))

    def passes(self, batch: Batch) -> None:
        def loss(logprobs: Tensor, _entropy: Tensor, _targets: Tensor) -> TokenLoss:
            return TokenLoss(logprobs, {})

        AttentionInterface.register(ATTENTION, without_attention)
        self._policy.accumulate(self._policy.pack(batch), batch, loss, temperature=1.0)


def seconds(calls: Sequence[Callable[[], object]], repeats: int) -> list[float]:
    """Processor time of each call, the least of several. They are called in turn, so that what
    disturbs one disturbs all."""
    times = [[_seconds(call) for call in calls] for _ in range(repeats)]
    return [min(each) for each in zip(*times, strict=True)]


def _seconds(call: Callable[[], object]) -> float:
    began = time.process_time()
    call()
    return time.process_time() - began


def rooms(
    records: Sequence[Sequence[Turn]], training: Training | None
) -> dict[str, Callable[[], object]]:
    """What each room does with the sessions."""
    groups = rollouts(records)
    batch = build_batch(groups)
    found: dict[str, Callable[[], object]] = {
        "record as bytes and back": lambda: read(records),
        "segments": lambda: rollouts(records),
        "batch": lambda: build_batch(groups),
        "packing": lambda: packed(batch),
    }
    if training is not None:
        found["passes without attention"] = lambda: training.passes(batch)
    return found


def by_turn(training: Training, repeats: int) -> list[str]:
    """Rows of the first table."""
    first, last = TURNS
    counts = (first, first + EXTRA, last - EXTRA, last)
    calls: dict[str, list[Callable[[], object]]] = {}
    for turns in counts:
        # Two trials whose last answers differ, so that what they share is computed in pieces.
        pair = [session(f"trial-{seed}", 0, turns) for seed in range(2)]
        pair[1][-1].sampled_ids[0] += 1
        for name, call in rooms(pair, training).items():
            calls.setdefault(name, []).append(call)
    found = {n: seconds(c, 3 if "passes" in n else repeats) for n, c in calls.items()}
    rows = []
    for name, (a, b, c, d) in found.items():
        # a pass computes what both share once
        tokens = EXTRA * TURN_TOKENS * (1 if "passes" in name else 2)
        early, late = 1e6 * (b - a) / tokens, 1e6 * (d - c) / tokens
        rows.append(f"| {name} | {early:.3f} | {late:.3f} | {late / early:.2f} |")
    return rows


def by_prompt(repeats: int) -> list[str]:
    """Rows of the second table."""
    count = GROUPS * GROUP
    calls: dict[str, list[Callable[[], object]]] = {}
    for prompt in (FIRST_PROMPT_TOKENS, SHORT_PROMPT_TOKENS):
        records = [session(f"trial-{seed}", prompt, 1, seed) for seed in range(count)]
        for name, call in rooms(records, None).items():
            calls.setdefault(name, []).append(call)
    ids = np.arange(FIRST_PROMPT_TOKENS, dtype=np.int32)
    same, floats, mask = ids.copy(), ids.astype(np.float32), ids > 0

    def copied_and_compared() -> None:
        for _ in range(count):
            # ids, log-probabilities, versions, turns and mask
            for each in (ids, floats, ids, ids, mask):
                each.copy()
            np.array_equal(ids, same)

    (least,) = seconds([copied_and_compared], repeats)
    rows = []
    for name, pair in calls.items():
        long, short = (f"{1e6 * each / count:.0f}" for each in seconds(pair, repeats))
        rows.append(f"| {name} | {long} | {short} |")
    least /= count
    return [*rows, f"| to copy and compare its tokens once | {1e6 * least:.0f} | |"]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.conversation",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for option in (MMAP_THRESHOLD, TRIM_THRESHOLD):
        ctypes.CDLL(None).mallopt(*option)
    first, last = TURNS
    head = f"turns {first + 1} to {first + EXTRA}", f"turns {last - EXTRA + 1} to {last}"
    with tempfile.TemporaryDirectory() as folder, patch.dict(AttentionInterface._global_mapping):
        print(f"| µs per new token | {head[0]} | {head[1]} | ratio |\n|---|---|---|---|")
        print("\n".join(by_turn(Training(Path(folder)), arguments.repeats)), flush=True)
    heads = f"first prompt of {FIRST_PROMPT_TOKENS:,} tokens | of {SHORT_PROMPT_TOKENS}"
    print(f"\n| µs per session of {GROUPS} x {GROUP} | {heads} |\n|---|---|---|")
    print("\n".join(by_prompt(arguments.repeats)))


if __name__ == "__main__":
    main()
