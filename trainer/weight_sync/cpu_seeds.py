"""Makes a vLLM on CPU draw the random numbers of a seeded request by position.

The token at position `p` of a sequence is drawn with a generator that is seeded with the request's
seed and `p`. Invariant: a seeded answer does not depend on the parts in which its prompt was
prefilled, on preemption, on other requests, or on where another call went on with it.

vLLM has one generator for a request, of which every token takes numbers. It samples a token after
each part of a prompt, too, discards it, and sets back the generator by the offset of a GPU's
generator; one of a CPU has no offset, and the error would end the engine.

Runs inside vLLM's processes.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch

from proxy.engines.vllm import FIRST_SEED

_64_BITS = (1 << 64) - 1


@functools.cache
def install() -> None:
    """Changes vLLM's runner of models in this process if its platform is a CPU."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    CPUModelRunner._sample = _by_position(CPUModelRunner._sample)
    CPUModelRunner._bookkeeping_sync = _without_offsets(CPUModelRunner._bookkeeping_sync)


def seed_at(seed: int, position: int) -> int:
    """The seed of the token at a position: the output of SplitMix64 (Steele et al., Fast Splittable
    Pseudorandom Number Generators, OOPSLA 2014), of which torch's generator uses 32 bits."""
    bits = ((seed << 32 | position) + 0x9E3779B97F4A7C15) & _64_BITS
    bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9 & _64_BITS
    bits = (bits ^ bits >> 27) * 0x94D049BB133111EB & _64_BITS
    return (bits ^ bits >> 31) & 0xFFFFFFFF


def discarded_generators(runner: Any) -> dict[int, torch.Generator]:
    """The generators of the seeded requests whose sampled token is discarded, by their rows."""
    batch = runner.input_batch
    rows = np.flatnonzero(runner.discard_request_mask.np[: batch.num_reqs]).tolist()
    return {row: batch.generators[row] for row in rows if row in batch.generators}


def _by_position(sample: Any) -> Any:
    def by_position(runner: Any, *arguments: Any, **named: Any) -> Any:
        batch = runner.input_batch
        for row, generator in batch.generators.items():
            params = runner.requests[batch.req_ids[row]].sampling_params
            seed = (params.extra_args or {}).get(FIRST_SEED, params.seed)
            generator.manual_seed(seed_at(seed, int(runner.optimistic_seq_lens_cpu[row])))
        return sample(runner, *arguments, **named)

    return by_position


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
