"""What every call uses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from proxy.metrics import Metrics
from proxy.records import Turn
from proxy.rendering.rendering import Rendering
from proxy.routing.router import Router
from proxy.serving.images import Images
from proxy.serving.ownership import Deliveries, Ownership
from proxy.serving.provider_tools import ProviderTools
from proxy.store.protocol import Store


@dataclass(frozen=True, slots=True)
class Backend:
    """The parts of the proxy that every call uses."""

    store: Store
    router: Router
    rendering: Rendering
    metrics: Metrics
    ownership: Ownership
    deliveries: Deliveries
    provider_tools: ProviderTools
    images: Images
    context_tokens: int | None
    """The configured limit on prompt and answer together, besides the engines' own."""
    call_timeout_s: float
    on_turn: Callable[[str, Turn, str], None] = lambda session_id, turn, model: None
    """Gets each recorded turn with the session that made the call and the requested model name;
    returns at once."""

    @property
    def room(self) -> int | None:
        """The smallest known limit on prompt and answer together."""
        known = [n for n in (self.context_tokens, self.router.context_tokens) if n is not None]
        return min(known, default=None)
