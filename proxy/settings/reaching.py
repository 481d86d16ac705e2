"""Keys that several sections have: where something listens, and how long it is waited for."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import Field

from proxy.settings.section import Common, Section


class FreeAddress(Section):
    """Where the run listens."""

    host: Common[str] = "127.0.0.1"
    """Address on which the proxy that the run starts, or the receiver of callbacks, listens."""
    port: Common[int] = Field(0, ge=0, le=65535)
    """Its port; 0: a free one."""


class Patience(Section):
    """Of what may be unreachable for a while."""

    patience_s: float = Field(60.0, ge=0)
    """Seconds that a request is repeated while what it is for does not answer: the proxy, which may
    be restarted, at the start and the end of a trial and at an update of the engines; the service
    of `http`; the API of `kubernetes`."""


class RayResources(Section):
    """Of what Ray places on a node."""

    resources: Mapping[str, float] = Field(default_factory=dict)
    """Ray's custom resources that each agent, or relay worker without a `command`, reserves on its
    node, such as `{agents: 1}` or `{site_b: 0.01}`, by which they are sent to a group of nodes."""


class StartTimeout(Section):
    """Of what the run starts."""

    start_timeout_s: float = Field(600.0, gt=0)
    """Seconds from the start until it answers: of an engine and of a relay's worker, which load the
    model, and of the proxy."""


class Restarts(StartTimeout):
    """Of what the run starts again."""

    restarts: int = Field(3, ge=0)
    """Maximum number of times in a run that each engine, or relay worker, which the run started is
    replaced after it has ended. An engine receives the weights before it receives calls, and needs
    a proxy that the run started; a worker is started after 1 s, 2 s, 4 s, up to a minute."""
