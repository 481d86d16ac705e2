"""Versions of an adapter in engines and on disk: each has a name of its own, old ones go."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from proxy.routing.policies import KEPT_VERSIONS
from tests.trainer.fake_engine import FakeEngine, fake_engine
from tests.trainer.test_fit import config_of, learner_of
from trainer.errors import WeightSyncError
from trainer.weight_sync.adapters import AdapterSync
from trainer.weight_sync.control import EngineControl
from trainer.weight_sync.segment import Named

CONFIG = {"r": 2, "lora_alpha": 4.0, "target_modules": ["q_proj"]}


def tensors(value: float) -> list[Named]:
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    return [(name, torch.full((2, 4), value))]


def send(
    sync: AdapterSync, value: float, version: int, config: Mapping[str, object] = CONFIG
) -> str:
    report = sync.push(tensors(value), config, version)
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


def test_same_weights_with_another_configuration_are_another_adapter(tmp_path: Path) -> None:
    with fake_engine() as (engine, url):
        sync = AdapterSync(EngineControl([url]), tmp_path, "planner")
        stronger = CONFIG | {"lora_alpha": 64.0}
        names = [send(sync, 1.0, 7), send(sync, 1.0, 7, stronger)]
        assert names[0] != names[1]
        assert send(sync, 1.0, 7, dict(reversed(stronger.items()))) == names[1]
        read = [Path(engine.adapters[name]) / "adapter_config.json" for name in names]
        assert [json.loads(each.read_text()) for each in read] == [CONFIG, stronger]
        sync.close()


@pytest.mark.parametrize("served", [[-1.0, -2.0], [-8.0, -9.0]])
def test_check_of_the_engines_leaves_no_trace_and_unloads_no_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, served: list[float]
) -> None:
    """Calls of the published version and of the one before run meanwhile."""
    asked: list[str | None] = []

    def answering(_: EngineControl, ids: object, model: str | None = None) -> list[list[float]]:
        asked.append(model)
        return [served]

    monkeypatch.setattr(EngineControl, "prompt_logprobs", answering)
    with fake_engine() as (engine, url):
        sync = AdapterSync(EngineControl([url]), tmp_path, "planner")
        versions = [send(sync, 6.0, 6), send(sync, 7.0, 7)]
        sync.close()
        sync = AdapterSync(EngineControl([url]), tmp_path, "planner")
        exact = served == [-1.0, -2.0]
        with nullcontext() if exact else pytest.raises(WeightSyncError, match="does not serve"):
            assert sync.try_out(tensors(99.0), CONFIG, [1, 2, 3], [-1.0, -2.0], 1e-3) == 0.0
        assert asked[0] not in (None, *versions)
        assert engine.calls.count("/v1/load_lora_adapter") == 3
        assert list(engine.adapters) == versions
        assert sorted(path.name for path in tmp_path.iterdir()) == versions
        assert sync.served_name == ""
        newest = send(sync, 8.0, 8)
        assert list(engine.adapters) == [versions[1], newest]
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


def test_new_connection_keeps_the_version_that_is_published(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine was replaced, so that the learner connects and checks all engines again."""
    config = config_of(
        checkpoint,
        model={"lora": {"rank": 2, "update": "adapter", "policy": "planner"}},
        engine={"verify": True, "verify_tolerance": 1e9},
        trainer={"run_dir": tmp_path},
    )
    learner = learner_of(config)
    learner.probe = [1, 2, 3]
    served = learner.score(learner.probe)
    monkeypatch.setattr(EngineControl, "prompt_logprobs", lambda *_, **__: [served])
    with fake_engine() as (engine, url):
        names: list[str | None] = []
        for learner.version in (6, 7):
            learner.connect([url])
            assert list(engine.adapters) == names
            learner.sync_weights()
            assert learner.served is not None
            names.append(learner.served.adapter)
        assert list(engine.adapters) == names
        learner.close()


def uses_weight_routes(engine: FakeEngine) -> bool:
    return any("weight_update" in call or call == "/sleep" for call in engine.calls)
