"""What a generation needs of the engines as a whole. `proxy.routing.Router` implements it."""

from __future__ import annotations

from collections.abc import Set
from typing import Protocol

from proxy.engines.protocol import Engine
from proxy.errors import EngineError, EngineRefusal, RequestError
from proxy.policies import Policies


class Replicas(Protocol):
    """The part of the router that a generation uses."""

    @property
    def patience_s(self) -> float:
        """How long an answer may stand still after a failure."""
        ...

    @property
    def policies(self) -> Policies:
        """The policies, each with the adapter that samples for it now."""
        ...

    @property
    def vocab_size(self) -> int: ...

    def choose(
        self,
        session_id: str,
        tried: Set[Engine],
        *,
        trained: bool,
        adapted: bool,
        only_healthy: bool,
    ) -> Engine | None:
        """A replica that is not in `tried`; None if there is none. `adapted`: it must serve
        adapters."""
        ...

    def serves(self, besides: Set[Engine], *, trained: bool, adapted: bool = False) -> bool:
        """Whether any replica that is not in `besides` takes such calls, healthy or not."""
        ...

    def failed(self, engine: Engine, error: EngineError) -> str:
        """Marks the replica as unhealthy until a check succeeds, unless it lacks only the call's
        adapter. Returns the log line's id."""
        ...

    def refused(self, engine: Engine, refusal: EngineRefusal) -> RequestError:
        """The error that the agent gets."""
        ...

    def version_of(self, engine: Engine) -> int:
        """The version of the replica's weights, as far as it is known."""
        ...

    def is_removed(self, engine: Engine) -> bool:
        """Whether the replica was removed while it had calls in flight."""
        ...

    async def released(self, engine: Engine) -> None:
        """To be called when a call of a removed replica has ended."""
        ...

    @property
    def paused(self) -> bool: ...

    async def until_running(self) -> float:
        """Waits while engines are paused. Returns the seconds waited."""
        ...

    async def until_joined(self, timeout_s: float) -> None:
        """Returns when a replica is added or healthy again, or after `timeout_s`."""
        ...
