"""The proxy's own fixtures serve the red team, too."""

from tests.proxy.conftest import checkpoint, proxy, rendering, start_proxy

__all__ = ["checkpoint", "proxy", "rendering", "start_proxy"]
