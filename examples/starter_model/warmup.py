"""Supervised warm-up: next-token loss on the tokens that the expert chose, and only on them.

Three things make it short:

- The tokens that all transcripts of a batch begin with (system prompt and tools, most of the
  tokens) go through the model once per batch instead of once per transcript.
- In the first half of the warm-up they are left out. The model learns to copy a word from a
  question in a short text, and then also does it in a long one.
- The matrices are trained with Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon).
  The model copies after about 100 steps, when it had not begun to with AdamW.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from transformers import DynamicCache, Qwen3ForCausalLM

from examples.starter_model.transcripts import Encoded


@dataclass(frozen=True)
class Recipe:
    """Duration and learning rates of the warm-up."""

    transcripts: int = 4800
    epochs: int = 5
    batch: int = 32
    learning_rate: float = 5e-3
    seed: int = 0
    lengths: str = "similar"
    """Lengths of the transcripts of a batch. `similar` has little padding. `mixed` is needed where
    the length depends on the words: the batches of one word each would teach that word, not to copy
    it."""


def warm_up(
    model: Qwen3ForCausalLM,
    transcripts: Sequence[Encoded],
    recipe: Recipe,
    report: Callable[[str], None],
) -> float:
    """Trains `model` in place. Returns the mean loss of the last tenth of the steps, in nats."""
    optimizers = _optimizers(model, recipe.learning_rate)
    batches = list(_batches(transcripts, recipe))
    losses: list[float] = []
    started = time.monotonic()
    for step, batch in enumerate(batches):
        loss = _loss(model, batch, with_beginning=step >= len(batches) // 2)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = recipe.learning_rate * _schedule(step, len(batches))
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
        if step % 20 == 0:
            seconds = time.monotonic() - started
            report(f"warm-up {step}/{len(batches)}  loss {losses[-1]:.3f}  {seconds:.0f} s")
    tail = losses[-max(1, len(losses) // 10) :]
    return sum(tail) / len(tail)


def _optimizers(model: Qwen3ForCausalLM, learning_rate: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, AdamW for the embedding and the norms."""
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    chosen = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in chosen]
    return [
        torch.optim.Muon(matrices, lr=learning_rate, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=learning_rate, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def _batches(transcripts: Sequence[Encoded], recipe: Recipe) -> Iterator[list[Encoded]]:
    """Batches in random order; each transcript once per epoch."""
    rng = random.Random(recipe.seed)
    for _ in range(recipe.epochs):
        if recipe.lengths == "mixed":
            order = list(range(len(transcripts)))
            rng.shuffle(order)
        else:
            keys = [(len(item.ids), rng.random()) for item in transcripts]
            order = sorted(range(len(transcripts)), key=keys.__getitem__)
        starts = list(range(0, len(order) - recipe.batch + 1, recipe.batch))
        if recipe.lengths == "similar":
            rng.shuffle(starts)
        for start in starts:
            yield [transcripts[i] for i in order[start : start + recipe.batch]]


def _schedule(step: int, steps: int) -> float:
    """Factor of the learning rate: rises linearly over 20 steps, stays constant, and falls linearly
    to a twentieth over the second half."""
    return min(1.0, (step + 1) / 20) * max(0.05, min(1.0, 2 * (1 - step / steps)))


def _loss(model: Qwen3ForCausalLM, batch: list[Encoded], *, with_beginning: bool) -> Tensor:
    """Mean −log p over the chosen tokens. Padding is on the right, so causality hides it.

    Shapes: `B` transcripts, `P` tokens of their common beginning, `T` of the longest rest.
    """
    shared = _common_prefix(batch)
    length = max(len(item.ids) for item in batch) - shared
    ids_B_T = torch.zeros(len(batch), length, dtype=torch.long)
    mask_B_T = torch.zeros(len(batch), length, dtype=torch.bool)
    for row, item in enumerate(batch):
        ids_B_T[row, : len(item.ids) - shared] = torch.from_numpy(item.ids[shared:])
        mask_B_T[row, : len(item.ids) - shared] = torch.from_numpy(item.mask[shared:])
    cache = DynamicCache(config=model.config)
    if with_beginning:
        model.model(input_ids=torch.from_numpy(batch[0].ids[:shared])[None], past_key_values=cache)
        cache.batch_repeat_interleave(len(batch))
    hidden_B_T_H = model.model(input_ids=ids_B_T[:, :-1], past_key_values=cache).last_hidden_state
    chosen = mask_B_T[:, 1:]
    return F.cross_entropy(model.lm_head(hidden_B_T_H[chosen]), ids_B_T[:, 1:][chosen])


def _common_prefix(batch: list[Encoded]) -> int:
    """Number of tokens that all transcripts begin with: none of them was chosen by the expert, and
    they are at least one fewer than the shortest transcript has."""
    shortest = min(min(len(item.ids), int(item.mask.argmax())) for item in batch) - 1
    rows = np.stack([item.ids[:shortest] for item in batch])
    differs = (rows != rows[0]).any(axis=0)
    return int(differs.argmax()) if differs.any() else shortest
