"""A relay worker pulls published weights into its engine, and serves whole versions only."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import fsspec
import pytest
from aiohttp import web
from pydantic import SecretStr

from proxy.client import ProxyClientError
from proxy.testing.scripted_engine import ScriptedEngine
from tests.clouds import NO_S3
from tests.needs import needs
from tests.proxy.conftest import StartProxy
from tests.proxy.extras.relay.conftest import TOKEN, Relay, StartWorker
from tests.proxy.extras.relay.weights_engine import Publications, WeightsEngine


async def test_worker_pulls_each_version_and_calls_are_recorded_with_it(
    relay: Relay, engine: WeightsEngine, tmp_path: Path
) -> None:
    await relay.worker(engine, tmp_path / "weights")
    for version, content in ((3, b"first weights"), (4, b"second weights")):
        await relay.announce(relay.published.add(version, content))
        worker = await relay.serves()
        assert (worker["version"], worker["error"]) == (version, None)
        assert engine.weights.find(content) >= 0
        assert engine.label == str(version)
        assert not engine.paused
        assert await relay.chat() == (200, [version])
    order = ["/init_weight_transfer_engine", "/sleep", "/reset_prefix_cache"]
    order += ["/start_weight_update", "/update_weights", "/finish_weight_update", "/wake_up"]
    assert [path for path in engine.requests if path in order] == 2 * order


async def test_call_across_an_update_is_sampled_before_and_after_it(
    relay: Relay, engine: WeightsEngine, tmp_path: Path
) -> None:
    """The worker neither aborts nor repeats a call when its engine gets new weights."""
    await relay.worker(engine, tmp_path / "weights")
    await relay.announce(relay.published.add(1, b"first"))
    await relay.serves()
    engine.token_delay_s = 0.2
    call = asyncio.create_task(relay.chat())
    await engine.called.wait()
    await relay.announce(relay.published.add(2, b"second"))
    await relay.serves()
    assert not call.done()
    assert (await call)[0] == 200
    assert (len(engine.calls), engine.aborts) == (1, [])


async def test_worker_that_joins_late_gets_no_calls_before_it_has_the_weights(
    relay: Relay, engine: WeightsEngine, tmp_path: Path
) -> None:
    name, server = relay.published.add(5, b"weights"), relay.published.server
    server.hold(relay.published.file(name))
    await relay.announce(name)
    await relay.worker(engine, tmp_path / "weights")
    call = asyncio.create_task(relay.chat())
    await server.asked.wait()
    assert not await relay.is_healthy()
    assert not call.done()
    assert engine.calls == []
    server.release()
    await relay.serves()
    assert await call == (200, [5])


async def test_worker_that_is_killed_in_a_pull_leaves_the_old_weights(
    relay: Relay, engine: WeightsEngine, tmp_path: Path
) -> None:
    worker = await relay.worker(engine, tmp_path / "weights")
    await relay.announce(relay.published.add(1, b"first"))
    await relay.serves()
    name, server = relay.published.add(2, b"second"), relay.published.server
    server.hold(relay.published.file(name))
    await relay.announce(name)
    await server.asked.wait()
    worker.signal(signal.SIGKILL)
    await worker.process.wait()
    await server.left.wait()
    server.release()
    assert (engine.label, engine.paused) == ("1", False)
    await relay.worker(engine, tmp_path / "weights")
    assert (await relay.serves())["version"] == 2
    assert await relay.chat() == (200, [2])


async def test_worker_that_is_killed_in_an_update_leaves_a_paused_engine_that_the_next_one_updates(
    relay: Relay, engine: WeightsEngine, tmp_path: Path
) -> None:
    worker = await relay.worker(engine, tmp_path / "weights")
    await relay.announce(relay.published.add(1, b"first"))
    await relay.serves()
    loading, go_on = asyncio.Event(), asyncio.Event()

    async def slow(_: web.Request) -> web.Response:
        loading.set()
        await go_on.wait()
        return web.json_response({})

    engine.slow_update = slow
    await relay.announce(relay.published.add(2, b"second"))
    await loading.wait()
    worker.signal(signal.SIGKILL)
    await worker.process.wait()
    assert (engine.label, engine.paused, engine.updating) == ("1", True, True)
    engine.slow_update = None
    await relay.worker(engine, tmp_path / "weights")
    assert (await relay.serves())["version"] == 2
    assert (engine.label, engine.paused) == ("2", False)
    assert engine.weights.find(b"second") >= 0


async def test_corrupted_file_is_an_error_until_it_is_whole(
    relay: Relay, engine: WeightsEngine, tmp_path: Path
) -> None:
    await relay.worker(engine, tmp_path / "weights")
    await relay.announce(relay.published.add(1, b"first"))
    await relay.serves()
    name = relay.published.add(2, b"second")
    relay.published.file(name).write_bytes(b"secone")
    await relay.announce(name)
    worker = await relay.settled()
    assert not worker["serves_wanted"]
    assert f"{name}/full-00000.safetensors is corrupted" in worker["error"]
    assert not await relay.is_healthy()
    assert engine.label == "1"
    relay.published.file(name).write_bytes(b"second")
    await relay.serves()
    assert await relay.chat() == (200, [2])


@pytest.mark.parametrize("path", ["/update_weights", "/finish_weight_update"])
async def test_engine_whose_update_fails_stays_paused_until_it_has_all_weights(
    relay: Relay, engine: WeightsEngine, tmp_path: Path, path: str
) -> None:
    await relay.worker(engine, tmp_path / "weights")
    await relay.announce(relay.published.add(1, b"first"))
    await relay.serves()
    engine.fails[path] = "a worker has run out of memory"
    await relay.announce(relay.published.add(2, b"second"))
    worker = await relay.settled()
    assert "a worker has run out of memory" in worker["error"]
    assert (engine.label, engine.paused) == ("1", True)
    assert not await relay.is_healthy()
    await relay.serves()
    assert (engine.label, engine.paused) == ("2", False)
    assert await relay.chat() == (200, [2])


async def test_update_waits_until_the_engine_loads_nothing_from_its_host_tier(
    relay: Relay, engine: WeightsEngine, tmp_path: Path
) -> None:
    """A paused vLLM does not end such a load, and refuses the reset until it has ended."""
    await relay.worker(engine, tmp_path / "weights")
    engine.fails["/reset_prefix_cache"] = "running requests waiting for remote KV transfer, which"
    await relay.announce(relay.published.add(1, b"first"))
    worker = await relay.serves()
    assert worker["error"] is None
    order = ["/sleep", "/wake_up", "/reset_prefix_cache", "/update_weights"]
    assert [path for path in engine.requests if path in order] == [
        *("/sleep", "/wake_up", "/sleep", "/reset_prefix_cache", "/update_weights", "/wake_up")
    ]


async def test_engine_that_was_restarted_gets_its_weights_before_calls(
    relay: Relay, engine: WeightsEngine, tmp_path: Path
) -> None:
    await relay.worker(engine, tmp_path / "weights")
    await relay.announce(relay.published.add(7, b"weights"))
    await relay.serves()
    engine.restart()
    engine.healthy = False
    engine.checked.clear()
    await engine.checked.wait()
    engine.healthy = True
    assert await relay.chat() == (200, [7])
    assert engine.weights.find(b"weights") >= 0


async def test_worker_that_is_late_samples_from_the_old_weights_until_the_deadline(
    relay: Relay, engine: WeightsEngine, tmp_path: Path
) -> None:
    await relay.worker(engine, tmp_path / "weights")
    await relay.announce(relay.published.add(1, b"first"))
    await relay.serves()
    name, server = relay.published.add(2, b"second"), relay.published.server
    server.hold(relay.published.file(name))
    await relay.announce(name)
    await server.asked.wait()
    assert await relay.chat() == (200, [1])
    await relay.announce(name, patience_s=0.2)
    worker = await relay.settled()
    assert (worker["serves_wanted"], worker["error"], worker["version"]) == (False, None, 1)
    assert not await relay.is_healthy()
    server.release()
    await relay.serves()
    assert await relay.chat() == (200, [2])


async def test_error_of_any_kind_is_reported_and_tried_again(
    relay: Relay, engine: WeightsEngine, tmp_path: Path
) -> None:
    async def nonsense(_: web.Request) -> web.Response:
        return web.json_response([])

    engine.world_size = nonsense
    await relay.worker(engine, tmp_path / "weights")
    await relay.announce(relay.published.add(1, b"first"))
    assert (await relay.settled())["error"].startswith("TypeError: ")
    engine.world_size = None
    await relay.serves()


async def test_worker_without_a_url_for_weights_says_what_to_give(
    relay: Relay, engine: WeightsEngine, tmp_path: Path
) -> None:
    await relay.worker(engine, tmp_path / "weights", url="none")
    assert await relay.chat() == (200, [0])
    await relay.announce(relay.published.add(1, b"first"))
    assert "give it as --weights-url the URL" in (await relay.settled())["error"]
    assert not await relay.is_healthy()


async def test_engine_that_takes_no_weights_is_told_its_flags(relay: Relay, tmp_path: Path) -> None:
    async with ScriptedEngine(lambda _: []) as engine:
        await relay.worker(engine, tmp_path / "weights")
        await relay.announce(relay.published.add(1, b"first"))
        error = (await relay.settled())["error"]
    assert "needs VLLM_SERVER_DEV_MODE=1, the package agentic-rl, and" in error


@pytest.mark.parametrize(
    ("held", "refused"), [("bfloat16", False), (None, False), ("float32", True)]
)
async def test_rounded_weights_are_only_for_engines_that_hold_them_so(
    relay: Relay, engine: WeightsEngine, tmp_path: Path, held: str | None, refused: bool
) -> None:
    engine.held = [held]
    await relay.worker(engine, tmp_path / "weights")
    await relay.announce(relay.published.add(1, bytes(8), dtype="bfloat16"))
    worker = await relay.settled()
    assert worker["serves_wanted"] != refused
    if refused:
        assert "w was published in bfloat16" in worker["error"]
        assert "holds it in float32; start it with the same --dtype" in worker["error"]
    else:
        assert (await relay.proxy.control.weights())["held_dtypes"] == [[held]]


async def test_types_of_a_large_mixture_of_experts_fit_into_one_request(
    relay: Relay, engine: WeightsEngine, tmp_path: Path
) -> None:
    name = "model.layers.47.mlp.experts.{}.down_proj.weight"
    tensors = [(name.format(number), "bfloat16", [2048, 768]) for number in range(20_000)]
    engine.held = [None] * len(tensors)
    await relay.worker(engine, tmp_path / "weights")
    assert await relay.proxy.control.held_types(tensors) == {"held_dtypes": [engine.held]}


@pytest.mark.parametrize("held", [["bfloat16", None], None])
async def test_types_of_an_engine_are_known_before_anything_is_published(
    relay: Relay, engine: WeightsEngine, tmp_path: Path, held: list[str | None] | None
) -> None:
    engine.held = held
    tensors = [("w", "float32", [4]), ("head", "float32", [2, 3])]
    assert await relay.proxy.control.held_types(tensors) == {"held_dtypes": []}
    await relay.worker(engine, tmp_path / "weights")
    assert await relay.proxy.control.held_types(tensors) == {"held_dtypes": [held]}
    assert await relay.chat() == (200, [0])


async def test_engine_that_is_restarted_during_a_pull_is_asked_again_for_its_types(
    relay: Relay, engine: WeightsEngine, tmp_path: Path
) -> None:
    engine.held = ["bfloat16"]
    await relay.worker(engine, tmp_path / "weights")
    await relay.announce(relay.published.add(1, bytes(8), dtype="bfloat16"))
    await relay.serves()
    name, server = relay.published.add(2, bytes(8), dtype="bfloat16"), relay.published.server
    server.hold(relay.published.file(name))
    await relay.announce(name)
    await server.asked.wait()
    engine.restart()
    engine.held = ["float32"]
    server.release()
    worker = await relay.settled()
    assert "holds it in float32; start it with the same --dtype" in str(worker["error"])
    assert engine.weights == b""


async def test_run_that_continues_from_an_earlier_step_goes_back_in_its_versions(
    relay: Relay, engine: WeightsEngine, tmp_path: Path
) -> None:
    await relay.worker(engine, tmp_path / "weights")
    for version in (5, 3):
        await relay.announce(relay.published.add(version, f"weights {version}".encode()))
        await relay.serves()
        assert await relay.chat() == (200, [version])


async def test_newer_weights_replace_a_pull_that_runs(
    relay: Relay, engine: WeightsEngine, tmp_path: Path
) -> None:
    await relay.worker(engine, tmp_path / "weights")
    name, server = relay.published.add(1, b"first"), relay.published.server
    server.hold(relay.published.file(name))
    await relay.announce(name)
    await server.asked.wait()
    await relay.announce(relay.published.add(2, b"second"))
    server.release()
    assert (await relay.serves())["version"] == 2
    assert engine.requests.count("/update_weights") == 1


@pytest.mark.long
@needs(NO_S3)
async def test_credentials_are_only_in_the_workers_environment(
    relay: Relay, engine: WeightsEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights at an S3 server: the proxy's process knows neither its address nor a key."""
    from moto.server import ThreadedMotoServer

    name = relay.published.add(6, b"weights")
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    keys = {"key": "of-the-site", "secret": "secret", "endpoint_url": f"http://{host}:{port}"}
    try:
        files = fsspec.filesystem("s3", **keys)
        files.mkdir("bucket")
        files.put(str(relay.published.folder), "bucket/weights", recursive=True)
        await relay.announce(name)
        with monkeypatch.context() as site:
            site.setenv("AWS_ACCESS_KEY_ID", keys["key"])
            site.setenv("AWS_SECRET_ACCESS_KEY", keys["secret"])
            site.setenv("AWS_ENDPOINT_URL", keys["endpoint_url"])
            await relay.worker(engine, tmp_path / "weights", url="s3://bucket/weights")
        await relay.serves()
    finally:
        server.stop()
    assert engine.weights.find(b"weights") >= 0
    assert await relay.chat() == (200, [6])


async def test_proxy_that_is_started_again_wants_the_same_weights(
    start_proxy: StartProxy,
    start_worker: StartWorker,
    engine: WeightsEngine,
    published: Publications,
    checkpoint: Path,
    tmp_path: Path,
) -> None:
    token = {"token": SecretStr(TOKEN), "grace_s": 0.2}
    before = await start_proxy(engine=engine, relay=token, store=f"sqlite:///{tmp_path}/a.db")
    relay = Relay(before, start_worker, published, checkpoint)
    name = published.add(3, b"weights")
    await relay.announce(name, run="run-a")
    with pytest.raises(ProxyClientError, match="belong to the run 'run-a'; end or continue") as at:
        await relay.announce(published.add(4, b"others"), run="run-b")
    assert at.value.status == 409
    await before.control.release_policy("", "run-a")
    await relay.announce(name, run="run-b")
    again = await start_proxy(engine=engine, relay=token, store=f"sqlite:///{tmp_path}/a.db")
    assert (await again.control.weights())["publication"] == name


async def test_proxy_without_a_relay_refuses_weights(start_proxy: StartProxy) -> None:
    proxy = await start_proxy()
    with pytest.raises(ProxyClientError, match=r"has no relay; set relay\.token") as at:
        await proxy.control.publish_weights(publication="a/v000001-000000000001", version=1)
    assert at.value.status == 409


@pytest.mark.parametrize("name", ["../v000001-000000000001", "a/../b", "/etc/passwd", "a/v1-2", ""])
async def test_only_names_of_publications_are_accepted(relay: Relay, name: str) -> None:
    with pytest.raises(ProxyClientError, match="publication") as at:
        await relay.proxy.control.publish_weights(publication=name, version=1)
    assert at.value.status == 400


async def test_version_is_that_of_the_publication(relay: Relay) -> None:
    with pytest.raises(ProxyClientError, match="version 2 is not that of a/v000001-") as at:
        await relay.proxy.control.publish_weights(publication="a/v000001-000000000001", version=2)
    assert at.value.status == 400
