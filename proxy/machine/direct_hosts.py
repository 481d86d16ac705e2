"""Which hosts are reached without the HTTP proxy that the environment names.

Company networks set HTTP_PROXY, HTTPS_PROXY or ALL_PROXY. What belongs to a run is reached
directly: this machine, and each host that an `http://` or `ws://` URL, a private address or a name
without a dot gives, because keys do not leave a network in plain text. Everything else, such as a
hosted model under `https://`, goes the way that the variables say. All of our clients ask
`proxy_for`, and every child process gets `with_direct_hosts`; no other place decides it.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Mapping
from urllib.parse import urlsplit

from proxy.errors import ConfigurationError

LOOPBACK = ("localhost", "127.0.0.1", "::1")
"""`::1` without brackets, because with `[::1]` httpx, and so OpenAI's SDK, cannot start."""
NAMES = ("NO_PROXY", "no_proxy")
"""Some programs read only one of the spellings."""
_PROXIES = frozenset({"http_proxy", "https_proxy", "all_proxy"})
_PLAIN = frozenset({"http", "ws"})


def proxy_for(url: str) -> str | None:
    """URL of the HTTP proxy through which this process reaches `url`; None: directly.

    Raises:
        ConfigurationError: the proxy is not an HTTP proxy.
    """
    from urllib.request import getproxies_environment, proxy_bypass  # imported here: it takes long

    if is_direct(url):
        return None
    proxies, parts = getproxies_environment(), urlsplit(url)
    proxy = proxies.get("https") or proxies.get("all")
    if not proxy or proxy_bypass(parts.hostname or ""):
        return None
    proxy = proxy if "://" in proxy else f"http://{proxy}"
    if urlsplit(proxy).scheme not in ("http", "https"):
        shown = proxy.rpartition("@")[2]
        raise ConfigurationError(
            f"HTTPS_PROXY or ALL_PROXY: {shown!r} is not an http:// or https:// proxy; set "
            f"HTTPS_PROXY to one, or NO_PROXY={parts.hostname} to reach that host directly"
        )
    return proxy


def is_direct(url: str) -> bool:
    """Whether the host of `url` is this machine or one of a run's own."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return parts.scheme in _PLAIN or "." not in host
    return parts.scheme in _PLAIN or not address.is_global


def reach_directly(*urls: str) -> None:
    """Does for this process what `with_direct_hosts` does for a child: for libraries that read the
    environment themselves."""
    os.environ.update(with_direct_hosts(os.environ, *urls))


def with_direct_hosts(environment: Mapping[str, str], *urls: str) -> dict[str, str]:
    """The environment of a child process: as given, and where it names an HTTP proxy, with this
    machine and those hosts of `urls` that are direct added to NO_PROXY and no_proxy.

    Example: {"HTTP_PROXY": "http://proxy:3128", "no_proxy": ".corp"} gets
    NO_PROXY and no_proxy=".corp,localhost,127.0.0.1,::1"
    """
    environment = dict(environment)
    if not any(name.lower() in _PROXIES and value for name, value in environment.items()):
        return environment
    hosts = [*LOOPBACK, *(urlsplit(url).hostname or "" for url in urls if is_direct(url))]
    given = {name: environment.get(name, "") for name in NAMES}
    for name, other in zip(NAMES, reversed(NAMES), strict=True):
        environment[name] = _joined(given[name] or given[other], hosts)
    return environment


def _joined(exempt: str, hosts: list[str]) -> str:
    listed = [part.strip() for part in exempt.split(",") if part.strip()]
    if "*" in listed:
        return exempt
    return ",".join(dict.fromkeys([*listed, *filter(None, hosts)]))
