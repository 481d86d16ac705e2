"""The proxy's Prometheus metrics, one registry per application."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from proxy.errors import ProxyError
from proxy.records import Turn


class Metrics:
    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._turns = Counter(
            "agentic_proxy_turns", "Turns recorded", ["status"], registry=self._registry
        )
        self._forks = Counter(
            "agentic_proxy_forks", "Turns that forked, by cause", ["cause"], registry=self._registry
        )
        self._prompt = Counter(
            "agentic_proxy_prompt_tokens", "Prompt tokens", ["part"], registry=self._registry
        )
        self._sampled = Counter(
            "agentic_proxy_sampled_tokens", "Sampled tokens", registry=self._registry
        )
        self._refused = Counter(
            "agentic_proxy_refused_calls",
            "Calls answered with an error",
            ["dialect", "status"],
            registry=self._registry,
        )
        self.in_flight = Gauge(
            "agentic_proxy_in_flight_calls", "Calls being answered", registry=self._registry
        )

    def recorded(self, turn: Turn) -> None:
        self._turns.labels(turn.status.value).inc()
        if turn.fork_cause is not None:
            self._forks.labels(turn.fork_cause.value).inc()
        self._prompt.labels("shared").inc(turn.shared_tokens)
        self._prompt.labels("new").inc(len(turn.prompt_ids))
        self._sampled.inc(len(turn.sampled_ids))

    def refused(self, dialect: str, error: ProxyError) -> None:
        self._refused.labels(dialect, str(error.status)).inc()

    def exposition(self) -> bytes:
        """The text format that Prometheus scrapes."""
        return generate_latest(self._registry)
