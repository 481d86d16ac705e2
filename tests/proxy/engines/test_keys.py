"""An engine's key comes from its URL, is sent with every request, and is never shown."""

from __future__ import annotations

import pytest
from aiohttp import web

from proxy.engines.address import EngineAddress
from proxy.engines.upstream import Upstream
from proxy.engines.vllm_key import Message, RequireKey
from proxy.errors import EngineError
from trainer.errors import WeightSyncError
from trainer.weight_sync.control import EngineControl


def test_key_is_removed_from_the_url() -> None:
    address = EngineAddress.parse("http://:se%2Fcret@127.0.0.1:9000/v1/")
    assert (address.url, address.key) == ("http://127.0.0.1:9000", "se/cret")
    assert "cret" not in repr(address)
    assert EngineAddress.parse(address.with_key) == address
    assert EngineAddress.parse("http://127.0.0.1:9000").key is None
    assert EngineAddress.parse(address.with_key, key="other").key == "other"


@pytest.mark.parametrize(
    "url",
    [
        "http://:ab/cd+e=@host:8001",
        "http://12/cd+e=@host:8001",
        "http://:12?cd+e=@host:8001",
        "http://:ab#cd+e=@host:8001",
        "http://:abcd+e=@",
        "http://:abcd+e=@host:port",
        "ws://:abcd+e=@host:8001",
    ],
)
def test_url_whose_host_or_key_is_cut_is_refused_without_showing_the_key(url: str) -> None:
    with pytest.raises(ValueError, match="write %2F for /") as refused:
        EngineAddress.parse(url)
    assert "cd+e" not in str(refused.value)


async def status_of(app: RequireKey, path: str, *keys: bytes) -> int:
    sent: list[Message] = []

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Message) -> None:
        sent.append(message)

    headers = [(b"host", b"x"), *((b"authorization", key) for key in keys)]
    await app({"type": "http", "path": path, "headers": headers}, receive, send)
    return int(sent[0]["status"])


async def test_every_route_except_health_needs_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    async def engine(scope: Message, receive: object, send: object) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})  # type: ignore[operator]

    monkeypatch.setattr(RequireKey, "key", "secret", raising=False)
    app = RequireKey(engine)
    assert await status_of(app, "/health") == 200
    for path in ("/pause", "/update_weights", "/inference/v1/generate", "/v1/models", "/metrics"):
        assert await status_of(app, path) == 401
        assert await status_of(app, path, b"Bearer wrong") == 401
        assert await status_of(app, path, b"Bearer secret", b"Bearer secret") == 401
        assert await status_of(app, path, b"Bearer secret") == 200


async def test_clients_send_the_key_of_the_url_but_never_show_it() -> None:
    async def whoami(request: web.Request) -> web.Response:
        right = request.headers.get("Authorization") == "Bearer secret"
        return web.json_response({"weight_version": "3"}, status=200 if right else 401)

    app = web.Application()
    app.router.add_get("/weight_info", whoami)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    bare = f"127.0.0.1:{runner.addresses[0][1]}"
    upstream = Upstream(f"http://:secret@{bare}")
    assert await upstream.get("/weight_info", timeout_s=5.0) == {"weight_version": "3"}
    assert "secret" not in upstream.url
    await upstream.close()
    wrong = Upstream(f"http://:wrong-key@{bare}")
    with pytest.raises(EngineError) as refused:
        await wrong.get("/weight_info", timeout_s=5.0)
    assert "wrong-key" not in refused.value.message
    await wrong.close()
    await runner.cleanup()


def test_weight_sync_does_not_show_the_key() -> None:
    control = EngineControl(["http://:secret@127.0.0.1:9"])
    with pytest.raises(WeightSyncError) as failed:
        control.check()
    assert "secret" not in str(failed.value)
    control.close()
