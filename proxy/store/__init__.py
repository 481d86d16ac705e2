"""Stores record sessions and turns. `open_store` opens the store that a URL names.

For a store from outside the package, the URL's scheme is the import path of its opener:
`store: my_package.my_store:open_it://anything`. The opener implements
`proxy.store.protocol.OpenStore`.
"""

from __future__ import annotations

from proxy.settings.plugins import load_plugin
from proxy.store.protocol import Durability, OpenStore, Store

STORES = {
    "sqlite": "proxy.store.sqlite:open_sqlite",
    "postgresql": "proxy.store.postgres:open_postgres",
    "postgres": "proxy.store.postgres:open_postgres",
}
"""URL scheme → import path of the opener."""


async def open_store(url: str, *, durability: Durability = "process", create: bool = True) -> Store:
    """Opens `sqlite:///FILE` (four slashes for an absolute path), a plain file path,
    `postgresql://…`, or a URL whose scheme is the import path of another store's opener.

    Raises:
        ConfigurationError: the store cannot be opened, or does not exist and `create` is False; the
            message gives the reason and what to do.
    """
    scheme, separator, _ = url.partition("://")
    opener: OpenStore = load_plugin("store", scheme if separator else "sqlite", STORES)
    return await opener(url, durability=durability, create=create)
