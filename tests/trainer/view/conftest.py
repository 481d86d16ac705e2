"""A real browser and proxies, as in the tests of the page of a proxy."""

from tests.proxy.conftest import checkpoint, proxy, rendering, start_proxy
from tests.proxy.extras.view.conftest import browser, tab

__all__ = ["browser", "checkpoint", "proxy", "rendering", "start_proxy", "tab"]
