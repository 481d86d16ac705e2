"""Lets a vLLM on CPU prefill the prompt of a seeded request in parts.

vLLM samples a token after each part of a prompt, discards it, and sets back the generator of a
seeded request by the offset of a GPU's generator; one of a CPU has no offset, and the error ends
the engine. Here the generator gets the state that it had before. Invariant: a seeded answer does
not depend on the parts in which its prompt was prefilled.

Runs inside vLLM's processes.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch


@functools.cache
def install() -> None:
    """Changes vLLM's runner of models in this process if its platform is a CPU."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    CPUModelRunner._sample = _setting_back(CPUModelRunner._sample)
    CPUModelRunner._bookkeeping_sync = _without_offsets(CPUModelRunner._bookkeeping_sync)


def discarded_generators(runner: Any) -> dict[int, torch.Generator]:
    """The generators of the seeded requests whose sampled token is discarded, by their rows."""
    batch = runner.input_batch
    rows = np.flatnonzero(runner.discard_request_mask.np[: batch.num_reqs]).tolist()
    return {row: batch.generators[row] for row in rows if row in batch.generators}


def _setting_back(sample: Any) -> Any:
    def setting_back(runner: Any, *arguments: Any, **named: Any) -> Any:
        before = [(each, each.get_state()) for each in discarded_generators(runner).values()]
        sampled = sample(runner, *arguments, **named)
        for generator, state in before:
            generator.set_state(state)
        return sampled

    return setting_back


def _without_offsets(keep_books: Any) -> Any:
    def without_offsets(runner: Any, *arguments: Any, **named: Any) -> Any:
        generators = runner.input_batch.generators
        set_back = discarded_generators(runner)
        for row in set_back:
            del generators[row]
        try:
            return keep_books(runner, *arguments, **named)
        finally:
            generators.update(set_back)

    return without_offsets
