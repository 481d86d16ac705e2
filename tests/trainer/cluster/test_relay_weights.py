"""A run waits until its relay workers serve the published weights, and says which do not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest

from proxy.client import ProxyClient
from proxy.records import ServedPolicy
from tests.trainer.test_fit import config_of
from trainer.cluster.engines import RunEngines
from trainer.cluster.rank_zero import (
    DescribeWeights,
    PublishWeights,
    RankRequest,
    RankZero,
    SentWeights,
)
from trainer.errors import WeightSyncError
from trainer.extras.relay.weights import RelayWeights
from trainer.weight_sync.published import Published

PUBLISHED = Published("run-a/v000007-019e5c41aa07", 7, 1000, delta_bytes=20, full_bytes=0)
DESCRIBED = [("w", "float32", [4])]


def worker(name: str = "gpu-0", **state: Any) -> dict[str, Any]:
    return {
        "name": name,
        "serves_wanted": True,
        "error": None,
        "held_dtypes": ["bfloat16"],
        "pull_s": 0.5,
        "paused_s": 0.1,
        "difference": 1e-5,
        **state,
    }


class ScriptedControl:
    """The proxy's control plane, whose workers are in these states, one after another."""

    def __init__(self, *states: list[dict[str, Any]]) -> None:
        self.states = list(states)
        self.published: list[dict[str, Any]] = []
        self.policies: list[tuple[str, int, str, str]] = []
        self.released: list[tuple[str, str]] = []
        self.held: list[Any] = []
        """What workers report of their types before anything is published."""

    async def publish_policy(self, *version: Any) -> None:
        assert self.published, "calls would name an adapter that no engine has"
        self.policies.append(version)

    async def publish_weights(self, **new: Any) -> None:
        self.published.append(new)

    async def held_types(self, tensors: list[Any]) -> dict[str, Any]:
        assert tensors == DESCRIBED
        return {"held_dtypes": self.held}

    async def weights(self, wait_s: float) -> dict[str, Any]:
        workers = self.states[0] if len(self.states) == 1 else self.states.pop(0)
        settled = bool(workers) and all(w["serves_wanted"] or w["error"] for w in workers)
        serving = [worker for worker in workers if worker["serves_wanted"]]
        held = [worker["held_dtypes"] for worker in serving]
        return {"settled": settled, "workers": workers, "held_dtypes": held}

    async def release_policy(self, name: str, run: str) -> None:
        self.released.append((name, run))

    @property
    def client(self) -> ProxyClient:
        return cast(ProxyClient, self)


class Trainer:
    """Rank 0, which publishes."""

    def __init__(self, published: Published = PUBLISHED) -> None:
        self.published = published
        self.requests: list[RankRequest[Any]] = []
        self.rank_zero = RankZero(self._send)

    async def _send(self, request: RankRequest[Any]) -> Any:
        self.requests.append(request)
        if isinstance(request, DescribeWeights):
            return [] if self.published.served else DESCRIBED
        if isinstance(request, PublishWeights):
            return self.published
        return SentWeights({"sync/paused_s": 0.3, "sync/bytes": 1000.0})


def relay(trainer: Trainer, said: list[str], timeout_s: float = 60.0) -> RelayWeights:
    return RelayWeights(trainer.rank_zero, "run-a", timeout_s, said.append)


async def test_run_waits_for_its_first_worker_and_for_each_to_load() -> None:
    trainer, said = Trainer(), list[str]()
    loading = worker("gpu-1", serves_wanted=False)
    control = ScriptedControl([], [worker(), loading], [worker(), worker("gpu-1", pull_s=2.0)])
    metrics = (await relay(trainer, said).send(control.client, needed=True)).metrics
    (published,) = control.published
    assert published["publication"] == PUBLISHED.name
    assert (published["version"], published["run"]) == (7, "run-a")
    assert len(control.states) == 1
    assert metrics["sync/pull_s"] == 2.0
    assert metrics["sync/delta_bytes"] == metrics["sync/bytes"] == 20
    assert metrics["sync/probe_abs_mean"] == 1e-5
    assert said == []


async def test_worker_that_fails_is_a_warning_while_another_one_serves() -> None:
    trainer, said = Trainer(), list[str]()
    broken = worker("gpu-1", serves_wanted=False, error="no space left", held_dtypes=None)
    weights = relay(trainer, said)
    await weights.send(ScriptedControl([worker(), broken]).client, needed=True)
    assert said == [
        "warning: relay worker gpu-1 gets no calls until it has version 7: no space left"
    ]
    await weights.send(ScriptedControl([worker()]).client, needed=True)
    assert isinstance(trainer.requests[0], DescribeWeights)
    first, second = trainer.requests[1:]
    assert first == PublishWeights("run-a")
    assert second == PublishWeights("run-a", (["bfloat16"],))


async def test_engine_that_cannot_report_its_types_gets_weights_as_they_are_trained() -> None:
    trainer = Trainer()
    weights = relay(trainer, [])
    for _ in range(2):
        silent = worker("gpu-1", held_dtypes=None)
        await weights.send(ScriptedControl([worker(), silent]).client, needed=True)
    published = [each for each in trainer.requests if isinstance(each, PublishWeights)]
    assert published == 2 * [PublishWeights("run-a")]


@pytest.mark.parametrize(
    ("held", "known"), [([["bfloat16"]], (["bfloat16"],)), ([["bfloat16"], None], ()), ([], ())]
)
async def test_first_version_is_published_in_the_types_of_the_engines_that_are_connected(
    held: list[Any], known: tuple[Any, ...]
) -> None:
    trainer, control = Trainer(), ScriptedControl([worker()])
    control.held = held
    await relay(trainer, []).send(control.client, needed=True)
    assert trainer.requests == [DescribeWeights(), PublishWeights("run-a", known)]


@pytest.mark.parametrize(
    ("workers", "why"),
    [
        ([], "none is connected"),
        ([worker(serves_wanted=False, error="no such bucket")], "gpu-0: no such bucket"),
        ([worker(serves_wanted=False)], "gpu-0: it is still loading them"),
    ],
)
async def test_run_ends_if_no_worker_has_the_weights_in_time(
    workers: list[dict[str, Any]], why: str
) -> None:
    weights = relay(Trainer(), [], timeout_s=0.0)
    with pytest.raises(WeightSyncError, match=rf"engine\.publish_timeout_s\): {why}"):
        await weights.send(ScriptedControl(workers).client, needed=True)


async def test_run_with_other_engines_does_not_wait_for_a_worker_to_join() -> None:
    control = ScriptedControl([])
    sent = await relay(Trainer(), []).send(control.client, needed=False)
    assert "sync/pull_s" not in sent.metrics


async def test_engines_with_urls_and_workers_get_the_same_version() -> None:
    trainer, control = Trainer(), ScriptedControl([worker()])
    engines = RunEngines(
        trainer.rank_zero, given_urls=["http://127.0.0.1:1"], run="run-a", publish_timeout_s=60.0
    )
    engines.proxy = control.client
    metrics = await engines.send_weights()
    names = [type(each).__name__ for each in trainer.requests]
    assert names == ["SyncWeights", "DescribeWeights", "PublishWeights"]
    assert metrics["sync/paused_s"] == 0.3
    assert metrics["sync/bytes"] == 1000
    await engines.release_policies()
    assert control.released == [("", "run-a")]


def test_running_proxy_with_relay_workers_needs_no_urls(tmp_path: Any, tiny_model: Any) -> None:
    server = {"url": "http://127.0.0.1:1"}
    engine = {"publish": f"file://{tmp_path}", "replicas": 0}
    config = config_of(tiny_model, engine=engine, proxy_server=server)
    assert config.engine.publish == f"file://{tmp_path}"
    for wrong in ({"replicas": 0}, {"publish": "file:///weights"}):
        with pytest.raises(ValueError, match=r"or set engine\.replicas=0 and engine\.publish"):
            config_of(tiny_model, engine=wrong, proxy_server=server)


async def test_adapter_is_sampled_from_when_the_workers_have_it() -> None:
    served = ServedPolicy("shop", 7, "shop@7.0123456789abcdef")
    trainer, control = Trainer(replace(PUBLISHED, served=served)), ScriptedControl([worker()])
    engines = RunEngines(trainer.rank_zero, run="run-a", publish_timeout_s=60.0)
    engines.proxy = control.client
    await engines.send_weights()
    names = [type(each).__name__ for each in trainer.requests]
    assert names == ["DescribeWeights", "PublishWeights"]
    assert control.policies == [("shop", 7, "shop@7.0123456789abcdef", "run-a")]
    await engines.release_policies()
    assert sorted(control.released) == [("", "run-a"), ("shop", "run-a")]


def test_several_policies_are_not_published(tiny_model: Any) -> None:
    engine = {"publish": "file:///weights"}
    lora = {"update": "adapter", "policy": "a"}
    policies = {"a": {}, "b": {"frozen": True}}
    with pytest.raises(ValueError, match=r"relay workers pull one policy \(engine\.publish\)"):
        config_of(tiny_model, engine=engine, model={"lora": lora}, trainer={"policies": policies})
