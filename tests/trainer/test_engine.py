"""The settings of section `engine` are passed to the server's command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from proxy.engines import vllm_platform, vllm_server
from tests.trainer.test_fit import config_of
from trainer.cluster.replica_server import replica_server
from trainer.engine import EnginesConfig
from trainer.policy.model_config import ModelConfig
from trainer.run.folder import RunFolder


def test_every_engine_setting_is_passed_to_the_server(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_platform, "installed", lambda: vllm_platform.CPU)
    engine = {
        "kv_cache_gib": 3,
        "gpu_memory_share": 0.4,
        "start_timeout_s": 7.0,
        "max_sequences": 5,
        "max_context_tokens": 64,
        "sleep": True,
        "args": ["--x", "y"],
        "env": {"A": "b"},
    }
    config = config_of(tiny_model, engine=engine, trainer={"seed": 3})
    server = replica_server(config, RunFolder.create(tmp_path / "a"), 1)()
    command = " ".join(server.command(9))
    for words in (
        f"--model {tiny_model} --dtype float32 --seed 4",
        f"--port {server.port}",
        "--gpu-memory-utilization 0.4",
        "--max-num-seqs 5",
        "--max-model-len 64",
        "--enable-sleep-mode",
        '--weight-transfer-config {"backend": "shm"}',
    ):
        assert words in command
    assert command.endswith(" --x y")
    environment = vllm_server.server_environment(server.config)
    assert (environment["VLLM_CPU_KVCACHE_SPACE"], environment["A"]) == ("3", "b")
    assert server.config.start_timeout_s == 7.0
    assert server.log == tmp_path / "a" / "logs" / "engine-1.log"


@pytest.mark.parametrize(
    ("trainer", "engine", "served", "tolerance"),
    [
        ("float32", "auto", "float32", 1e-3),
        ("bfloat16", "auto", "bfloat16", 0.06),
        ("float32", "bfloat16", "bfloat16", 0.06),
    ],
)
def test_tolerance_depends_on_the_types_of_trainer_and_engine(
    tiny_model: Path, trainer: str, engine: str, served: str, tolerance: float
) -> None:
    model = ModelConfig.model_validate({"path": tiny_model, "compute_dtype": trainer})
    config = EnginesConfig.model_validate({"dtype": engine})
    assert config.served_dtype(model) == served
    assert config.mismatch_tolerance(model) == tolerance
    given = EnginesConfig(verify_tolerance=0.5)
    assert given.mismatch_tolerance(model) == given.probe_tolerance(model) == 0.5
