"""The swarm's status in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from agent_loop.extras.swarm.wire import EngineState, Status


def exposition(status: Status, waiting: int) -> bytes:
    """`waiting`: number of claims that wait for an episode."""
    registry = CollectorRegistry()
    registry.register(_StatusMetrics(status, waiting))
    return generate_latest(registry)


class _StatusMetrics(Collector):
    """Gauges, because episodes change their state, and a batch that was not trained is returned."""

    def __init__(self, status: Status, waiting: int) -> None:
        self._status = status
        self._waiting = waiting

    def collect(self) -> Iterable[Metric]:
        status = self._status
        state = GaugeMetricFamily(
            "agentic_swarm_engine_state", "1 for the state of the engine", labels=["state"]
        )
        for each in EngineState:
            state.add_metric([each.value], float(each is status.state))
        episodes = GaugeMetricFamily(
            "agentic_swarm_episodes", "Episodes since the server's first start", labels=["state"]
        )
        for name, count in status.counts.items():
            episodes.add_metric([name], count)
        yield from (state, episodes)
        values: list[tuple[str, str, float | None]] = [
            ("open_episodes", "Episodes that are claimed and have not ended", status.open_episodes),
            ("collected_episodes", "Ended episodes that wait for a batch", status.collected),
            ("waiting_claims", "Claims that wait for an episode", self._waiting),
            ("groups_ready", "Complete groups of the next batch", status.groups_ready),
            ("groups_wanted", "Groups of a batch", status.groups_wanted),
            ("clients", "Clients seen in the last ten minutes", len(status.clients)),
            ("batches", "Batches handed to the trainer", status.batch),
            ("policy_version", "Version of the policy's weights", status.version),
            ("batch_mean_reward", "Mean reward of the last batch", status.mean_reward),
        ]
        for name, help_text, value in values:
            if value is not None:
                yield GaugeMetricFamily(f"agentic_swarm_{name}", help_text, value=value)
