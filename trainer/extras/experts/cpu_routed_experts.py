"""Lets a vLLM on CPU return routed experts, in the same form as one on a GPU.

vLLM implements `--enable-return-routed-experts` in its second model runner, which needs Triton, and
refuses it elsewhere. Its parts do not depend on that: the routers of every runner call a function
with their choice, and the connectors that collect the rows and keep those of cached prefixes work
on plain arrays. This module connects them to the runner for CPUs. Invariant: without the option,
nothing changes.

Runs inside vLLM's processes.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np


@functools.cache
def install() -> None:
    """Changes vLLM's classes in this process if its platform is a CPU."""
    from vllm.config import VllmConfig
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    check = VllmConfig._verify_aux_output_compatibility

    def check_on_cpu(config: Any) -> None:
        with patch.object(VllmConfig, "use_v2_model_runner", True):
            check(config)
        if config.aux_output_config.enabled and config.speculative_config is not None:
            raise ValueError(
                "--enable-return-routed-experts is not supported with speculative decoding on CPU"
            )

    VllmConfig._verify_aux_output_compatibility = check_on_cpu
    for name, wrapped in (
        ("initialize_kv_cache", _connecting),
        ("execute_model", _beginning),
        ("sample_tokens", _collecting),
    ):
        setattr(CPUModelRunner, name, wrapped(getattr(CPUModelRunner, name)))


def _connecting(initialize: Any) -> Any:
    """Connects the routers once the model is loaded and the KV cache has its size."""

    def initialize_kv_cache(runner: Any, kv_cache_config: Any, *more: Any, **named: Any) -> None:
        from vllm.distributed.aux_output_connector.worker import get_aux_output_connector

        initialize(runner, kv_cache_config, *more, **named)
        if runner.vllm_config.aux_output_config.enabled:
            runner.routed_experts = get_aux_output_connector(
                runner.model, runner.vllm_config, kv_cache_config
            )

    return initialize_kv_cache


def _beginning(execute: Any) -> Any:
    """Registers the requests of a step before its forward pass."""

    def execute_model(runner: Any, scheduler_output: Any, *more: Any, **named: Any) -> Any:
        if (connector := getattr(runner, "routed_experts", None)) is not None:
            connector.begin_step(scheduler_output.aux_output_connector_metadata)
            runner.scheduled_tokens = scheduler_output.num_scheduled_tokens
        return execute(runner, scheduler_output, *more, **named)

    return execute_model


def _collecting(sample: Any) -> Any:
    """Adds the rows of a step's forward pass to its output."""

    def sample_tokens(runner: Any, *more: Any, **named: Any) -> Any:
        connector = getattr(runner, "routed_experts", None)
        if connector is None or runner.execute_model_state is None:
            return sample(runner, *more, **named)
        pending = connector.prepare_output(_executed(runner))
        output = sample(runner, *more, **named)
        if pending is not None:
            sampled = np.array([len(ids) for ids in output.sampled_token_ids])
            pending.enqueue_cpu_copy(num_sampled=sampled, num_rejected=np.zeros_like(sampled))
            output.aux_output_connector_output = pending.process_output()
        return output

    return sample_tokens


def _executed(runner: Any) -> SimpleNamespace:
    """The requests of the step in the order of their rows, as the second model runner has them."""
    names = list(runner.input_batch.req_ids)
    counts = [runner.scheduled_tokens[name] for name in names]
    return SimpleNamespace(
        req_ids=names,
        query_start_loc_np=np.concatenate([[0], np.cumsum(counts)]),
        num_computed_tokens_np=runner.input_batch.num_computed_tokens_cpu[: len(names)].copy(),
    )
