"""The proxy's own fixtures serve the real agents, too."""

from tests.proxy.conftest import checkpoint, rendering, start_proxy

__all__ = ["checkpoint", "rendering", "start_proxy"]
