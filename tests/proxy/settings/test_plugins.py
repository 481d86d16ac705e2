"""Parts are loaded by short name and by import path, those of every extra, too."""

from __future__ import annotations

import pytest

from proxy.engines.registry import ENGINES
from proxy.errors import ConfigurationError
from proxy.settings.plugins import load_plugin
from proxy.store import STORES, open_store
from proxy.store.protocol import Durability, SessionFilter, Store


@pytest.mark.parametrize("registry", [STORES, ENGINES])
def test_every_part_of_a_registry_can_be_imported(registry: dict[str, str]) -> None:
    assert registry
    for name in registry:
        assert callable(load_plugin("setting", name, registry))


@pytest.mark.parametrize(
    "name", ["nothing", "no.such.module:part", "proxy.settings.plugins:nothing", ":x"]
)
def test_part_that_cannot_be_loaded_is_refused_naming_its_setting(name: str) -> None:
    with pytest.raises(ConfigurationError, match=r"^store: "):
        load_plugin("store", name, STORES)


def test_unknown_short_name_is_refused_listing_the_known_ones() -> None:
    with pytest.raises(ConfigurationError, match="postgres, postgresql, sqlite, or"):
        load_plugin("store", "mysql", STORES)


async def open_elsewhere(url: str, *, durability: Durability, create: bool) -> Store:
    """A store from outside the package, which keeps its sessions in a SQLite file."""
    _, _, file = url.partition("://")
    return await open_store(f"sqlite:///{file}", durability=durability, create=create)


async def test_store_from_outside_the_package_is_loaded_by_its_import_path(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    file = tmp_path_factory.mktemp("store") / "outside.sqlite"
    store = await open_store(f"{__name__}:open_elsewhere://{file}")
    assert await store.list_sessions(SessionFilter()) == []
    await store.close()
    assert file.is_file()
