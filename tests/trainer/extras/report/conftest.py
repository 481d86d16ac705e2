"""A real browser and proxies, as in the tests of the page of a proxy."""

from tests.proxy.conftest import checkpoint, rendering, start_proxy
from tests.proxy.extras.view.conftest import browser, tab

__all__ = ["browser", "checkpoint", "rendering", "start_proxy", "tab"]
