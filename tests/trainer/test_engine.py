"""The settings of section `engine` are passed to the server's command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer.engine import EnginesConfig, vllm_options
from trainer.policy.model import ModelConfig


def test_every_engine_setting_is_passed_to_the_server(tmp_path: Path) -> None:
    engine = EnginesConfig(
        kv_cache_gib=3,
        gpu_memory_share=0.4,
        start_timeout_s=7.0,
        max_sequences=5,
        max_context_tokens=64,
        sleep=True,
        args=("--x",),
        env={"A": "b"},
    )
    options = vllm_options(engine, ModelConfig(path=tmp_path), seed=3, log=tmp_path / "log")
    assert (options.model, options.seed, options.log) == (tmp_path, 3, tmp_path / "log")
    assert (options.kv_cache_gib, options.gpu_memory_share) == (3, 0.4)
    assert (options.max_sequences, options.max_context_tokens) == (5, 64)
    assert options.start_timeout_s == 7.0
    assert options.extra_args == ("--x", "--enable-sleep-mode")
    assert options.environment == {"A": "b"}
    assert options.weight_transfer == '{"backend": "shm"}'


@pytest.mark.parametrize(
    ("trainer", "engine", "served", "tolerance"),
    [
        ("float32", "auto", "float32", 1e-3),
        ("bfloat16", "auto", "bfloat16", 2e-2),
        ("float32", "bfloat16", "bfloat16", 2e-2),
    ],
)
def test_tolerance_depends_on_the_types_of_trainer_and_engine(
    tmp_path: Path, trainer: str, engine: str, served: str, tolerance: float
) -> None:
    model = ModelConfig.model_validate({"path": tmp_path, "compute_dtype": trainer})
    config = EnginesConfig.model_validate({"dtype": engine})
    assert config.served_dtype(model) == served
    assert config.mismatch_tolerance(model) == tolerance
    given = EnginesConfig(verify_tolerance=0.5)
    assert given.mismatch_tolerance(model) == given.probe_tolerance(model) == 0.5
