"""The recording proxy. Importing it does no work: a public name is loaded when it is used."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from proxy.app import build_app as build_app
    from proxy.client import ProxyClient as ProxyClient
    from proxy.client import SessionHandle as SessionHandle
    from proxy.config import ProxyConfig as ProxyConfig
    from proxy.config import load_config as load_config
    from proxy.records import Session as Session
    from proxy.records import Turn as Turn

    __version__: str

_MODULES = {
    "ProxyClient": "proxy.client",
    "ProxyConfig": "proxy.config",
    "Session": "proxy.records",
    "SessionHandle": "proxy.client",
    "Turn": "proxy.records",
    "build_app": "proxy.app",
    "load_config": "proxy.config",
}
__all__ = [
    "ProxyClient",
    "ProxyConfig",
    "Session",
    "SessionHandle",
    "Turn",
    "__version__",
    "build_app",
    "load_config",
]


def __getattr__(name: str) -> Any:
    """Loads a public name. Raises AttributeError for any other name."""
    if name == "__version__":
        from importlib.metadata import version

        return version("agentic-rl")
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_MODULES[name]), name)
