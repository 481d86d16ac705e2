"""The proxy's Prometheus metrics, one registry per application."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence, Set
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, generate_latest
from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample
from prometheus_client.utils import floatToGoString

from proxy.errors import ProxyError
from proxy.records import BranchMode, Turn, TurnStatus

MAX_UNKNOWN_NAMES = 100


SECONDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 900.0)
"""Upper bounds of the buckets of times."""
Reading = Callable[[], Iterable[tuple[Sequence[str], float]]]
"""Label values and the value, of each sample that there is now."""


class Metrics:
    """Counters and gauges of one proxy process."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._turns = self.counter("turns", "Turns recorded", "status")
        self._call_s = _Times("agentic_proxy_call_seconds", "Time of a recorded turn, to its end")
        self._first_token_s = _Times(
            "agentic_proxy_first_token_seconds", "Time to the first token of a recorded turn"
        )
        for times in (self._call_s, self._first_token_s):
            self._registry.register(times)
        self._maxima: set[str] = set()
        """Gauges of what all processes of a proxy know alike: they are not added up."""
        self._forks = self.counter("forks", "Turns that forked, by cause", "cause")
        self._prompt = self.counter("prompt_tokens", "Prompt tokens", "part")
        self._sampled = self.counter("sampled_tokens", "Sampled tokens")
        self._refused = self.counter(
            "refused_calls", "Calls answered with an error", "dialect", "status"
        )
        self._unknown_fields = self.counter(
            "unknown_fields", "Fields of requests that no known API has", "dialect", "name"
        )
        self._unknown_names: set[str] = set()
        self._noted = {
            "shown_as_text": self.counter(
                "shown_as_text", "Parts of requests that models see as a short text", "type"
            ),
            "tools_left_out": self.counter(
                "tools_left_out", "Tools that the model is not shown, in requests", "type"
            ),
            "scrubbed": self.counter(
                "scrubbed", "Texts that a profile removed from system messages", "pattern"
            ),
        }
        """Kind of a note → how often."""
        self._noted_types: set[str] = set()
        self._provider_tools = self.counter(
            "provider_tool_calls", "Calls of a provider's tools that the proxy ran", "tool", "end"
        )
        self._spelled = self.counter(
            "control_tokens", "Control tokens in texts of users and tools, encoded as text"
        )
        self._engine_failures = self.counter(
            "engine_failures",
            "Calls that failed at an engine: status 502 is an unusable answer, 503 no answer",
            "engine",
            "status",
        )
        self._resumed = self.counter(
            "resumed_generations",
            "Answers that another call of an engine continued, by what had happened to the first",
            "cause",
        )
        self._replayed = self.counter(
            "replayed_turns",
            "Recorded turns that answered a call of a branch: exact, or with tolerated differences",
            "match",
        )
        self._diverged = self.counter(
            "diverged_calls", "Calls of a branch that were not the recorded ones", "mode"
        )
        for status in TurnStatus:
            self._turns.labels(status.value)  # shown from the start
        for part in ("shared", "new"):
            self._prompt.labels(part)
        self._uncounted: defaultdict[tuple[Counter, str], int] = defaultdict(int)
        """What each call adds to counters, by label; `exposition` passes it on, because a counter
        takes a lock and four function calls each time."""
        self.in_flight = Gauge(
            "agentic_proxy_in_flight_calls", "Calls being answered", registry=self._registry
        )

    def counter(self, name: str, words: str, *labels: str) -> Counter:
        """A new counter, `agentic_proxy_NAME`."""
        return Counter(f"agentic_proxy_{name}", words, labels, registry=self._registry)

    def gauge(self, name: str, words: str, value: Callable[[], float]) -> None:
        """A new gauge, `agentic_proxy_NAME`, with the value of this moment."""
        Gauge(f"agentic_proxy_{name}", words, registry=self._registry).set_function(value)

    def gauges(
        self, name: str, words: str, labels: Sequence[str], read: Reading, *, shared: bool
    ) -> None:
        """A new gauge, `agentic_proxy_NAME`, with what is read when it is asked. `shared`: all
        processes of the proxy read the same, of which one counts; else they are added up."""
        full = f"agentic_proxy_{name}"
        self._registry.register(_Gauges(full, words, labels, read))
        if shared:
            self._maxima.add(full)

    def histogram(self, name: str, words: str, buckets: Sequence[float], *labels: str) -> Histogram:
        """A new histogram, `agentic_proxy_NAME`."""
        full = f"agentic_proxy_{name}"
        return Histogram(full, words, labels, buckets=buckets, registry=self._registry)

    def recorded(self, turn: Turn, model: str) -> None:
        """A turn is recorded, whose agent requested this model name."""
        uncounted = self._uncounted
        uncounted[self._turns, turn.status] += 1
        if turn.fork_cause is not None:
            uncounted[self._forks, turn.fork_cause] += 1
        uncounted[self._prompt, "shared"] += turn.shared_tokens
        uncounted[self._prompt, "new"] += len(turn.prompt_ids)
        uncounted[self._sampled, ""] += len(turn.sampled_ids)
        if turn.duration_s is not None:
            self._call_s.observe(turn.duration_s)
        if turn.first_token_s is not None:
            self._first_token_s.observe(turn.first_token_s)

    def refused(self, dialect: str, error: ProxyError) -> None:
        self._refused.labels(dialect, str(error.status)).inc()

    def unknown_field(self, dialect: str, name: str) -> None:
        """Agents choose the names: only the first MAX_UNKNOWN_NAMES have a label of their own."""
        if len(self._unknown_names) < MAX_UNKNOWN_NAMES:
            self._unknown_names.add(name)
        self._unknown_fields.labels(dialect, name if name in self._unknown_names else "other").inc()

    def provider_tool(self, name: str, *, is_error: bool) -> None:
        self._provider_tools.labels(name, "error" if is_error else "ok").inc()

    def noted(self, kind: str, name: str) -> None:
        """Counts a part of a request that is not taken as it is (`wire.fields.Note`). Agents choose
        the types: only the first MAX_UNKNOWN_NAMES have a label of their own."""
        if len(self._noted_types) < MAX_UNKNOWN_NAMES:
            self._noted_types.add(name)
        self._noted[kind].labels(name if name in self._noted_types else "other").inc()

    def spelled(self, tokens: int) -> None:
        self._spelled.inc(tokens)

    def engine_failed(self, engine: str, error: ProxyError) -> None:
        self._engine_failures.labels(engine, str(error.status)).inc()

    def resumed(self, cause: str) -> None:
        self._resumed.labels(cause).inc()

    def replayed(self, turns: int, *, tolerated: bool) -> None:
        self._replayed.labels("tolerated" if tolerated else "exact").inc(turns)

    def diverged(self, mode: BranchMode) -> None:
        self._diverged.labels(mode.value).inc()

    def exposition(self, others: Sequence[bytes] = ()) -> bytes:
        """The metrics in Prometheus' text format, added to those of the expositions in `others`."""
        for (counter, label), count in self._uncounted.items():
            (counter.labels(label) if label else counter).inc(count)
        self._uncounted.clear()
        own = generate_latest(self._registry)
        return generate_latest(_Sum([own, *others], self._maxima)) if others else own


class _Times(Collector):
    """A histogram for the way of every call: `prometheus_client`'s takes a lock for each bucket."""

    def __init__(self, name: str, words: str) -> None:
        self._family = name, words
        self._counts = [0] * (len(SECONDS) + 1)
        self._sum = 0.0

    def observe(self, seconds: float) -> None:
        self._counts[bisect_left(SECONDS, seconds)] += 1
        self._sum += seconds

    def collect(self) -> Iterable[Metric]:
        family = HistogramMetricFamily(*self._family)
        bounds = [*map(floatToGoString, SECONDS), "+Inf"]
        family.add_metric([], list(zip(bounds, accumulate(self._counts), strict=True)), self._sum)
        return [family]


class _Gauges(Collector):
    """What is read when it is asked."""

    def __init__(self, name: str, words: str, labels: Sequence[str], read: Reading) -> None:
        self._family = name, words, labels
        self._read = read

    def describe(self) -> Iterable[Metric]:
        name, words, labels = self._family
        return [GaugeMetricFamily(name, words, labels=labels)]

    def collect(self) -> Iterable[Metric]:
        name, words, labels = self._family
        family = GaugeMetricFamily(name, words, labels=labels)
        for row, value in self._read():
            family.add_metric(row, value)
        return [family]


class _Sum(Collector):
    """The sum of several expositions, sample by sample; of `maxima`, the largest."""

    def __init__(self, expositions: Sequence[bytes], maxima: Set[str]) -> None:
        self._expositions = expositions
        self._maxima = maxima

    def collect(self) -> Iterable[Metric]:
        families: dict[str, Metric] = {}
        values: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], float]] = {}
        for exposition in self._expositions:
            for family in text_string_to_metric_families(exposition.decode()):
                if family.name.endswith("_created"):  # start times cannot be added
                    continue
                families.setdefault(family.name, family)
                known = values.setdefault(family.name, {})
                for sample in family.samples:
                    key = (sample.name, tuple(sorted(sample.labels.items())))
                    others = known.get(key, 0.0)
                    if family.name in self._maxima:
                        known[key] = max(others, sample.value)
                    else:
                        known[key] = others + sample.value
        for name, family in families.items():
            family.samples = [
                Sample(sample, dict(labels), value)
                for (sample, labels), value in values[name].items()
            ]
        return families.values()
