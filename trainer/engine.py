"""Section `engine`: the vLLM servers of a run, and how they are started."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

from pydantic import Field

from proxy.engines.vllm_server import VllmOptions
from proxy.section import Section
from trainer.policy.model import ModelConfig
from trainer.weight_sync.transports import Backend


class EnginesConfig(Section):
    """Example: EnginesConfig(replicas=2, max_context_tokens=32768)"""

    urls: tuple[str, ...] = ()
    """URLs of running vLLM servers in development mode; empty: start `replicas` servers."""
    replicas: int = Field(1, ge=1)
    """Number of servers to start, each with the whole model."""
    dtype: Literal["float32", "bfloat16", "auto"] = "auto"
    """Type of the engine's weights and activations. `auto`: the same as `model.compute_dtype`; with
    any other type, the log-probabilities of trainer and engine differ at every token."""
    max_context_tokens: int | None = Field(None, ge=2)
    """Maximum number of tokens of a call's prompt and answer together; None: the checkpoint's own
    limit."""
    max_sequences: int | None = Field(None, ge=1)
    """Maximum number of answers that one replica samples at a time; None: vLLM's default."""
    kv_cache_gib: int | None = Field(None, ge=1)
    """Memory in GiB for keys and values of each replica on CPU; None: 1."""
    gpu_memory_share: float | None = Field(None, gt=0, le=1)
    """Share of the GPU's memory for each replica. In mode `colocated` the trainer needs the rest.
    None: vLLM's default."""
    args: tuple[str, ...] = ()
    """Additional arguments of vLLM's server, such as `["--tensor-parallel-size", "2"]`."""
    env: dict[str, str] = Field(default_factory=dict)
    """Environment variables of vLLM's server, in addition to those of the run."""
    start_timeout_s: float = Field(600.0, gt=0)
    """Seconds that a server may take to load the model and answer."""
    sleep: bool = False
    """Mode `colocated` on GPUs only: engines free their GPU memory while the trainer needs it
    (vLLM's sleep mode)."""
    restarts: int = Field(3, ge=0)
    """Maximum number of times in a run that each server which the run started is replaced after it
    has ended. A replacement receives the weights before it receives calls. Needs a proxy that the
    run started."""
    weight_transfer: Backend = "shm"
    """How weights are sent to engines: `shm` (shared memory) on one machine, `ipc` or `nccl`
    between GPUs."""
    verify: bool = True
    """Compare the engine's log-probabilities with the trainer's on a probe after each update."""
    verify_tolerance: float = Field(0.0, ge=0)
    """Maximum mean |Δ log p| between trainer and engine. 0: 1e-3 in float32; in bfloat16, 2e-2 on
    sampled tokens and 0.1 on the probe, whose tokens are improbable (vLLM itself differs from
    float32 by 0.035 on the quickstart's probe)."""

    def served_dtype(self, model: ModelConfig) -> str:
        """The type in which the engine serves this model."""
        return model.compute_dtype if self.dtype == "auto" else self.dtype

    def mismatch_tolerance(self, model: ModelConfig) -> float:
        """Maximum mean |Δ log p| of trainer and engine on tokens sampled from the same weights."""
        return self.verify_tolerance or (1e-3 if self._is_exact(model) else 2e-2)

    def probe_tolerance(self, model: ModelConfig) -> float:
        """Maximum mean |Δ log p| of trainer and engine on the probe."""
        return self.verify_tolerance or (1e-3 if self._is_exact(model) else 0.1)

    def _is_exact(self, model: ModelConfig) -> bool:
        return model.compute_dtype == self.served_dtype(model) == "float32"


def vllm_options(engine: EnginesConfig, model: ModelConfig, *, seed: int, log: Path) -> VllmOptions:
    """The options to start one server on a free port; its output is written to the file `log`."""
    return VllmOptions(
        model=model.path,
        log=log,
        dtype=engine.served_dtype(model),
        max_context_tokens=engine.max_context_tokens,
        max_sequences=engine.max_sequences,
        kv_cache_gib=engine.kv_cache_gib,
        gpu_memory_share=engine.gpu_memory_share,
        weight_transfer=json.dumps({"backend": engine.weight_transfer}),
        seed=seed,
        extra_args=(*engine.args, *(["--enable-sleep-mode"] if engine.sleep else [])),
        environment=engine.env,
        start_timeout_s=engine.start_timeout_s,
    )
