"""Keys that several sections have: where something listens, and how long it is waited for."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import Field

from proxy.settings.section import Common, Section


class ListeningAddress(Section):
    """Where the proxy, or a run's receiver of callbacks, listens."""

    host: Common[str] = "127.0.0.1"
    """The address to listen on."""
    port: Common[int] = Field(0, ge=0, le=65535)
    """The port to listen on; 0 for any free one."""


class PublicUrl(Section):
    """Of what listens and may be reached by another address than its own."""

    public_url: str | None = None
    """The URL by which others reach it: agents the proxy, an agent service the receiver of
    callbacks. Default: `http://HOST:PORT`."""


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


class ClusterRoom(Section):
    """Of a run's share of a cluster."""

    room_timeout_s: float = Field(600.0, gt=0)
    """Seconds to wait for room in the cluster: of a run, until it has enough free resources; of a
    trial, for one of `agents`, and again for a node and for the image."""


class ClusterAgents(ClusterRoom):
    """Of agents in a cluster."""

    agents: int = Field(1000, ge=1)
    """Maximum number of agents of this run in the cluster at the same time; further trials wait."""


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
