"""A relay worker pulls published adapters into its engine, which goes on sampling."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import orjson
import pytest

from proxy.extras.relay.weights.publication import ADAPTER_FILE, MANIFEST
from proxy.routing.policies import KEPT_VERSIONS
from tests.proxy.extras.relay.conftest import Relay
from tests.proxy.extras.relay.weights_engine import WeightsEngine

POLICY = "shop"


async def sampled_from(relay: Relay, name: str, served: str) -> None:
    """As a trainer does: the workers get the adapter, and then calls name it."""
    version = int(name.partition("/v")[2][:6])
    await relay.announce(name)
    assert (await relay.serves())["adapter"] == served
    await relay.proxy.control.publish_policy(POLICY, version, served)


async def test_each_version_is_loaded_without_a_pause_and_recorded(
    relay: Relay, engine: WeightsEngine, tmp_path: Path
) -> None:
    await relay.worker(engine, tmp_path / "weights")
    names = []
    for version in range(3, KEPT_VERSIONS + 5):
        name, served = relay.published.add_adapter(version, -1.0 - version / 100, base=-1.0)
        await sampled_from(relay, name, served)
        names.append(served)
        assert [*engine.adapters] == names[-2:]
        assert await relay.chat(POLICY) == (200, [version])
        assert engine.calls[-1].model == served
    assert await relay.chat() == (200, [0])
    assert not {"/sleep", "/update_weights", "/init_weight_transfer_engine"} & {*engine.requests}
    kept = {each.name for each in (tmp_path / "weights" / "adapters").iterdir()}
    assert kept == {*names[-KEPT_VERSIONS:]}


async def test_running_answer_continues_with_the_new_version(
    relay: Relay, engine: WeightsEngine, tmp_path: Path
) -> None:
    """It is cut when calls may name the new version, and its first tokens keep theirs."""
    relay.proxy.answers("An answer of many tokens.")
    await relay.worker(engine, tmp_path / "weights")
    await sampled_from(relay, *relay.published.add_adapter(1, -1.1))
    engine.token_delay_s = 0.2
    call = asyncio.create_task(relay.chat(POLICY))
    await engine.called.wait()
    await engine.calls[-1].began.wait()
    name, served = relay.published.add_adapter(2, -1.2)
    await sampled_from(relay, name, served)
    engine.token_delay_s = 0.0
    assert await call == (200, [1, 2])


@pytest.mark.parametrize("is_late", [True, False], ids=["late joiner", "in time"])
async def test_engine_with_other_weights_is_refused_by_name(
    relay: Relay, engine: WeightsEngine, tmp_path: Path, is_late: bool
) -> None:
    engine.base_score = -1.5
    name, served = relay.published.add_adapter(4, -1.4, base=-1.0)
    if is_late:
        await relay.announce(name)
    await relay.worker(engine, tmp_path / "weights")
    if not is_late:
        await relay.announce(name)
    worker = await relay.settled()
    assert f"other weights than those to which the adapter {served} belongs" in worker["error"]
    assert "mean |Δ log p| is 5.00e-01" in worker["error"]
    assert not await relay.is_healthy()
    assert not engine.adapters
    engine.base_score = -1.0  # another engine at the address
    assert (await relay.serves())["adapter"] == served


async def test_engine_that_ignores_adapters_is_found_by_a_random_one(
    relay: Relay, engine: WeightsEngine, tmp_path: Path
) -> None:
    """The first version of an adapter changes nothing."""
    check, random = relay.published.add_adapter(0, -3.0, label="check")
    name, served = relay.published.add_adapter(0, -1.0, base=-1.0, check=check)
    engine.ignores_adapters = True
    await relay.worker(engine, tmp_path / "weights")
    await relay.announce(name)
    error = (await relay.settled())["error"]
    assert f"does not serve the adapter {random} as the trainer does" in error
    assert not engine.adapters
    engine.ignores_adapters = False
    assert (await relay.serves())["adapter"] == served
    assert [*engine.adapters] == [served]
    assert [each.name for each in (tmp_path / "weights" / "adapters").iterdir()] == [served]
    # An engine that was tested is not tested again.
    tests = engine.requests.count("/v1/load_lora_adapter")
    await sampled_from(relay, *relay.published.add_adapter(1, -1.1, base=-1.0, check=check))
    assert engine.requests.count("/v1/load_lora_adapter") == tests + 1


async def test_engine_that_was_trained_as_a_whole_is_refused_until_it_is_restarted(
    relay: Relay, engine: WeightsEngine, tmp_path: Path
) -> None:
    await relay.worker(engine, tmp_path / "weights")
    await relay.announce(relay.published.add(6, b"weights"))
    await relay.serves()
    name, _ = relay.published.add_adapter(7, -1.4)
    await relay.announce(name)
    error = (await relay.settled())["error"]
    assert "the engine got the weights '6' since; restart it" in error
    engine.restart()
    await relay.serves()


async def test_engine_that_was_restarted_is_tested_and_gets_its_adapter_before_calls(
    relay: Relay, engine: WeightsEngine, tmp_path: Path
) -> None:
    await relay.worker(engine, tmp_path / "weights")
    name, served = relay.published.add_adapter(4, -1.4, base=-1.0)
    await sampled_from(relay, name, served)
    engine.restart()
    engine.base_score = -1.5
    assert (await relay.chat(POLICY))[0] == 502
    async with asyncio.timeout(60):
        while "other weights" not in str((await relay.settled())["error"]):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    assert not engine.calls
    engine.base_score = -1.0
    await relay.serves()
    assert await relay.chat(POLICY) == (200, [4])
    assert [*engine.adapters] == [served]


async def test_call_of_a_version_that_an_engine_lacks_does_not_cost_it_other_calls(
    relay: Relay, engine: WeightsEngine, tmp_path: Path
) -> None:
    """A worker that has joined between two steps has only the version that comes next."""
    await relay.worker(engine, tmp_path / "weights")
    await relay.proxy.control.publish_policy(POLICY, 3, "shop@3.0123456789abcdef")
    name, served = relay.published.add_adapter(4, -1.4)
    await relay.announce(name)
    await relay.serves()
    assert (await relay.chat(POLICY))[0] == 502
    assert engine.lacked.is_set()
    assert await relay.is_healthy()
    assert await relay.chat() == (200, [0])
    await relay.proxy.control.publish_policy(POLICY, 4, served)
    assert await relay.chat(POLICY) == (200, [4])


async def test_worker_that_is_killed_in_a_pull_leaves_the_old_adapter(
    relay: Relay, engine: WeightsEngine, tmp_path: Path
) -> None:
    worker = await relay.worker(engine, tmp_path / "weights")
    first, served = relay.published.add_adapter(1, -1.1, base=-1.0)
    await sampled_from(relay, first, served)
    name, later = relay.published.add_adapter(2, -1.2, base=-1.0)
    server = relay.published.server
    server.hold(relay.published.folder / name / ADAPTER_FILE)
    await relay.announce(name)
    await server.asked.wait()
    assert await relay.chat(POLICY) == (200, [1])
    worker.signal(signal.SIGKILL)
    await worker.process.wait()
    await server.left.wait()
    server.release()
    assert [*engine.adapters] == [served]
    await relay.worker(engine, tmp_path / "weights")
    await relay.serves()
    assert [*engine.adapters] == [served, later]


@pytest.mark.parametrize("what", ["tensors", "configuration"])
async def test_corrupted_adapter_is_not_loaded(
    relay: Relay, engine: WeightsEngine, tmp_path: Path, what: str
) -> None:
    await relay.worker(engine, tmp_path / "weights")
    name, served = relay.published.add_adapter(2, -1.2)
    folder = relay.published.folder / name
    manifest = (folder / MANIFEST).read_bytes()
    if what == "tensors":
        (folder / ADAPTER_FILE).write_bytes(b"-1.3")
    else:
        changed = orjson.loads(manifest)
        changed["adapter"]["config"] = '{"r": 1, "lora_alpha": 64}'
        (folder / MANIFEST).write_bytes(orjson.dumps(changed))
    await relay.announce(name)
    error = (await relay.settled())["error"]
    assert ("is corrupted" if what == "tensors" else "its configuration was changed") in error
    assert not engine.adapters
    (folder / ADAPTER_FILE).write_bytes(b"-1.2")
    (folder / MANIFEST).write_bytes(manifest)
    assert (await relay.serves())["adapter"] == served


async def test_engine_without_adapters_is_told_its_flags(
    relay: Relay, engine: WeightsEngine, tmp_path: Path
) -> None:
    engine.missing.add("/v1/load_lora_adapter")
    await relay.worker(engine, tmp_path / "weights")
    await relay.announce(relay.published.add_adapter(2, -1.2)[0])
    error = (await relay.settled())["error"]
    assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1, --enable-lora and --max-lora-rank" in error
