"""A dialect from outside the package is served like a built-in one."""

from __future__ import annotations

from typing import Any

import pytest

from proxy.errors import ConfigurationError
from proxy.wire.chat import ChatDialect
from proxy.wire.registry import open_dialects


class ShoutingDialect(ChatDialect):
    """Chat Completions on a route of its own."""

    name = "shouting"
    route = "shout"


OWN = "tests.proxy.wire.test_registry:ShoutingDialect"


async def test_dialect_from_outside_the_package_is_served_and_recorded(start_proxy: Any) -> None:
    proxy = await start_proxy(dialects=[OWN])
    session = await proxy.session()
    body = {"messages": [{"role": "user", "content": "Hi."}]}
    status, reply = await proxy.post(session, "shout", body)
    assert (status, reply["choices"][0]["message"]["content"]) == (200, "Hello.")
    _, (turn,) = await proxy.record(session)
    assert turn.dialect == "shouting"


def test_built_in_dialects_remain_available() -> None:
    routes = {"chat/completions", "completions", "responses", "responses/compact", "messages"}
    assert open_dialects().keys() == routes
    assert open_dialects([OWN]).keys() == routes | {"shout"}


def test_path_that_cannot_be_imported_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="dialects: cannot import nowhere:Nothing"):
        open_dialects(["nowhere:Nothing"])
