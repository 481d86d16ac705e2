"""Which hosts an agent in a Harbor trial reaches without the HTTP proxy of its environment.

The rules are those of `proxy/machine/direct_hosts.py`; harbor_sdk has a copy, because it
imports no other package.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from urllib.parse import urlsplit

LOOPBACK = ("localhost", "127.0.0.1", "::1")
NAMES = ("NO_PROXY", "no_proxy")
_PROXIES = frozenset({"http_proxy", "https_proxy", "all_proxy"})


def is_direct(url: str) -> bool:
    """Whether the host of `url` is this machine or one of a run's own."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return parts.scheme == "http" or "." not in host
    return parts.scheme == "http" or not address.is_global


def with_direct_hosts(environment: Mapping[str, str], *urls: str) -> dict[str, str]:
    """The environment, and where it names an HTTP proxy, with this machine and those hosts of
    `urls` that are direct added to NO_PROXY and no_proxy."""
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
