"""The extras of the proxy, by the names of their sections in the configuration.

An extra is what the proxy can do without (`proxy.extra`). Invariant: this table has import paths
only. An extra's modules are imported when the configuration names its section, or when the proxy
starts if it is always on; without its folder and its line here, the rest of the proxy works.
An extra outside this package needs no line: name it in `extras`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from proxy.errors import ConfigurationError
from proxy.settings.plugins import load_plugin


@dataclass(frozen=True, slots=True)
class Registered:
    """Where an extra is."""

    extra: str
    """The import path of a class derived from `proxy.extra.Extra`."""
    section: str | None = None
    """The import path of the type of its section; None: it has no settings of its own."""
    always: bool = False
    """Whether it is on where the configuration does not name it."""
    paths: tuple[str, ...] = ()
    """First parts of the paths that answer `missing` while it is off."""
    missing: str = ""
    """How to switch it on."""


EXTRAS: dict[str, Registered] = {
    "telemetry": Registered(
        "proxy.extras.telemetry.extra:TurnTelemetry",
        section="proxy.extras.telemetry.spans:TelemetryConfig",
    ),
    "scheduling": Registered(
        "proxy.extras.schedule.extra:Scheduling",
        section="proxy.extras.schedule.section:SchedulingConfig",
    ),
    "relay": Registered(
        "proxy.extras.relay.extra:Relay",
        section="proxy.extras.relay.section:RelayConfig",
        paths=("/weights",),
        missing="this proxy has no relay; set relay.token, with which workers connect to it",
    ),
    "rules": Registered(
        "proxy.extras.rules.extra:SearchRules", "proxy.extras.rules.rules:Rules", always=True
    ),
    "quotas": Registered("proxy.extras.quotas:SharedQuotas", always=True),
    "page": Registered("proxy.extras.view.extra:Page", always=True),
}
"""In the order in which they start; they end in the reverse order."""
COMMANDS = (
    "proxy.extras.export.arguments:add_commands",
    "proxy.extras.rewind.arguments:add_commands",
    "proxy.extras.view.arguments:add_commands",
    "proxy.extras.learn.arguments:add_commands",
)
"""Functions that add commands to `agentic-proxy`. Their modules import nothing that takes long."""
BINARY_ROUTE_CLIENT: str | None = "proxy.extras.binary_route.client:FramesClient"
BINARY_ROUTE_SERVER: str | None = "proxy.extras.binary_route.vllm.FramesRoute"
"""A client of vLLM that is faster than JSON, and the middleware that vLLM needs for it."""
FOLDER_NOTES: str | None = "proxy.extras.learn.consent:notes_of_folder"
"""What `agentic-proxy run` notes in a session's metadata about the agent's folder."""
LEARNERS = "proxy.extras.learn.section:with_learners"
"""What `serve --learn FILE` adds to the configuration."""
PAGE_LINKS: str | None = "proxy.extras.view.access"
"""The module of links that open the page once; a run prints one of them."""
PDF_PAGES: str | None = "proxy.extras.pdf_pages.pages"
"""The module that renders the pages of a document, where its library is installed."""
SEVERAL_PROCESSES = "proxy.extras.several_processes.workers:serve_workers"
"""What serves the port if `workers` is more than 1."""


def section_type(name: str) -> Any:
    """The type of an extra's section.

    Raises:
        ConfigurationError: the extra is not there, or cannot be imported.
    """
    if name not in EXTRAS or EXTRAS[name].section is None:
        raise ConfigurationError(f"{name}: this proxy is installed without this extra")
    return load_plugin(name, EXTRAS[name].section or "", {})


def named_extras(config: object) -> Iterator[str]:
    """The names of the extras that a configuration names, or that are always on."""
    for name, registered in EXTRAS.items():
        if registered.always or getattr(config, name, None) is not None:
            yield name
