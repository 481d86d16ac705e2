"""Versions of an adapter in engines and on disk: each has a name of its own, old ones go."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.trainer.fake_engine import FakeEngine, fake_engine
from tests.trainer.test_fit import config_of, learner_of
from trainer.errors import WeightSyncError
from trainer.weight_sync.adapters import KEPT_VERSIONS, AdapterSync
from trainer.weight_sync.control import EngineControl

CONFIG = {"r": 2, "lora_alpha": 4.0, "target_modules": ["q_proj"]}


def send(sync: AdapterSync, value: float, version: int) -> str:
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    report = sync.push([(name, torch.full((2, 4), value))], CONFIG, version)
    assert (report.version, report.size_bytes, report.paused_s) == (version, 32, 0.0)
    return sync.served_name


def test_each_version_has_a_name_of_its_own_and_the_same_weights_the_same(tmp_path: Path) -> None:
    with fake_engine() as (engine, url):
        sync = AdapterSync(EngineControl([url]), tmp_path, "planner")
        first, second = send(sync, 1.0, 7), send(sync, 2.0, 7)
        assert first.startswith("planner@7.")
        assert first != second
        assert send(sync, 1.0, 7) == first
        assert engine.calls.count("/v1/load_lora_adapter") == 2
        folder = Path(engine.adapters[first])
        assert json.loads((folder / "adapter_config.json").read_text()) == CONFIG
        (tensor,) = load_file(folder / "adapter_model.safetensors").values()
        assert tensor.tolist() == [[1.0] * 4] * 2
        sync.close()


def test_last_two_versions_are_loaded_and_the_last_eight_are_on_disk(tmp_path: Path) -> None:
    """Also across a new connection, and without touching the adapters of another policy."""
    with fake_engine() as (engine, url):
        engine.adapters["coder@1.aa"] = "elsewhere"
        (tmp_path / "coder@1.aa").mkdir(parents=True)
        names = []
        for version in range(12):
            sync = AdapterSync(EngineControl([url]), tmp_path, "planner")
            names.append(send(sync, float(version), version))
            sync.close()
        assert set(engine.adapters) == {"coder@1.aa", *names[-2:]}
        kept = {path.name for path in tmp_path.iterdir()}
        assert kept == {"coder@1.aa", *names[-KEPT_VERSIONS:]}


def test_engines_that_serve_something_else_are_refused_before_anything_is_sampled(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new adapter changes nothing, so the test of the engines uses a random one."""
    config = config_of(
        checkpoint,
        model={"lora": {"rank": 2, "update": "adapter", "policy": "planner"}},
        engine={"verify": True},
        trainer={"run_dir": tmp_path},
    )
    learner = learner_of(config)
    learner.probe = [1, 2, 3, 4, 5, 6, 7, 8]
    initial = learner.score(learner.probe)

    def ignoring(self: EngineControl, ids: object, model: str | None = None) -> list[list[float]]:
        return [initial]

    monkeypatch.setattr(EngineControl, "prompt_logprobs", ignoring)
    with fake_engine() as (_, url):
        with pytest.raises(WeightSyncError, match="does not serve this policy's adapters"):
            learner.connect([url])
        assert learner.served is None
        assert learner.score(learner.probe) == initial
        learner.close()


def test_learner_sends_its_adapter_only(checkpoint: Path, tmp_path: Path) -> None:
    config = config_of(
        checkpoint,
        model={"lora": {"rank": 2, "update": "adapter", "policy": "planner"}},
        trainer={"run_dir": tmp_path},
    )
    learner = learner_of(config)
    with fake_engine() as (engine, url):
        learner.connect([url])
        metrics = learner.sync_weights()
        served = learner.served
        assert served is not None
        assert (served.name, served.version) == ("planner", 0)
        assert list(engine.adapters) == [served.adapter]
        assert not uses_weight_routes(engine)
        weights = sum(tensor.nbytes for _, tensor in learner.weights())
        assert 0 < metrics["sync/bytes"] < weights
        learner.close()


def uses_weight_routes(engine: FakeEngine) -> bool:
    return any("weight_update" in call or call == "/pause" for call in engine.calls)
