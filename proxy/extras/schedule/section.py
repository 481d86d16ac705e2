"""The section `scheduling` of the configuration."""

from __future__ import annotations

from pydantic import Field

from proxy.settings.section import Section


class SchedulingConfig(Section):
    """Calls wait so that the sessions that sample fit the engines' KV caches; `scheduling: {}` is
    enough. Agents must accept that a call takes `max_wait_s` longer. Only engines that report the
    size of their cache are scheduled."""

    max_wait_s: float = Field(default=300.0, gt=0)
    """Maximum number of seconds that a call waits for room; then it goes to the engine anyway. No
    call waits for more than a tenth of the time that its session has left, and one that is not
    streamed for at most half of its client's own time-out, which most clients send."""
    cache_share: float = Field(default=0.95, gt=0, le=1)
    """The share of each engine's cache that the sessions of this proxy may use. Set it lower if
    others call the same engines."""
