"""What sessions record of each sampled token besides its probability."""

from __future__ import annotations

from pydantic import Field

from proxy.records.alternatives import MAX_ALTERNATIVES
from proxy.settings.section import Common, Section


class RecordedConfig(Section):
    """Example: RecordedConfig(alternatives=5).recorded == {"alternatives": 5}"""

    routed_experts: bool = False
    """Record the experts that the router of a mixture-of-experts model chose for each token
    (docs/models.md). In a run, `model.router_replay: replay` does so in any case; in a proxy,
    `sampling.routed_experts` of a session may say otherwise."""
    alternatives: Common[int] = Field(0, ge=0, le=MAX_ALTERNATIVES)
    """Number of the most probable tokens to record at each sampled position (docs/view.md); in a
    proxy, `sampling.alternatives` of a session may say otherwise."""

    @property
    def recorded(self) -> dict[str, int]:
        """What every session records in addition, as sampling parameters."""
        wanted = {"routed_experts": int(self.routed_experts), "alternatives": self.alternatives}
        return {name: value for name, value in wanted.items() if value}
