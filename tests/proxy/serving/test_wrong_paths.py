"""A wrong path is answered with what to type instead, in a form that the clients print."""

from __future__ import annotations

import pytest

from tests.proxy.conftest import RunningProxy


@pytest.mark.parametrize(
    ("method", "path", "said"),
    [
        ("POST", "/chat/completions", "set the base URL to http://{host}/v1"),
        ("POST", "/t/chat/completions/", "set the base URL to http://{host}/t/v1"),
        ("POST", "/api/messages", "set the base URL to http://{host}/api/v1"),
        ("GET", "/v1/chat/completions", "use POST"),
        ("PUT", "/t/v1/messages", "use POST"),
        ("GET", "/t/v1", "calls are POST /v1/chat/completions, "),
        ("GET", "/" + "x" * 5000, "x does not exist; calls are POST "),
    ],
)
async def test_wrong_path_says_what_to_type(
    proxy: RunningProxy, method: str, path: str, said: str
) -> None:
    async with proxy.http.request(method, proxy.url + path, json={}) as response:
        assert response.status == 404
        error = (await response.json())["error"]
    host = proxy.url.removeprefix("http://")
    assert error["message"].startswith(f"{method} {path[:200]}")
    assert said.format(host=host) in error["message"]
    assert len(error["message"]) < 500
