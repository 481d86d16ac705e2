"""The dialects that the proxy serves, by their route after `/v1/`."""

from __future__ import annotations

from collections.abc import Sequence

from proxy.settings.plugins import load_plugin
from proxy.wire.dialect import Dialect

DIALECTS = {
    "chat": "proxy.wire.chat:ChatDialect",
    "completions": "proxy.wire.completions:CompletionsDialect",
    "messages": "proxy.wire.messages:MessagesDialect",
    "responses": "proxy.wire.responses:ResponsesDialect",
    "responses_compact": "proxy.wire.responses:CompactDialect",
}


def open_dialects(own: Sequence[str] = ()) -> dict[str, Dialect]:
    """Every dialect by its route. `own` are import paths of dialect classes from outside this
    package; one with the same route as a built-in dialect replaces it.

    Raises ConfigurationError for a path that cannot be imported.
    """
    made: list[Dialect] = [load_plugin("dialects", name, DIALECTS)() for name in (*DIALECTS, *own)]
    return {dialect.route: dialect for dialect in made}
