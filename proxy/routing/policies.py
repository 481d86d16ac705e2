"""The policies that sessions sample from: LoRA adapters on the engines' weights, with versions.

A policy is published by name (`PUT /policies/{name}/version`). The engines know each version of it
by another name (`planner@7.3fa9c2`), because vLLM's prefix cache and its running requests identify
an adapter by name: a name that got new weights would mix two versions.

Invariant: a call of an engine names the adapter of exactly one version, so that every token that it
samples has that version. A running answer of a policy that gets a new version is cut at the engine,
and the rest of it is sampled from the new version; answers that cannot be continued exactly end
with the version that they began with.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from proxy.engines.protocol import Engine
from proxy.records import ServedPolicy

KEPT_VERSIONS = 8
"""Number of versions whose files are kept. vLLM reads the files of a running call's adapter again
if other adapters took its place in memory; a call that runs during 8 updates has lost its place in
every training anyway."""
LOADED_VERSIONS = 2
"""Number of versions that engines accept calls for: a call that was sent when the new version was
published still names the one before."""
MAX_ADAPTER_CHARS = 256


BASE = ServedPolicy("", 0, "")
"""The engines' own weights, whose version the engines report."""


@dataclass(frozen=True, slots=True)
class _Running:
    served: ServedPolicy
    engine: Engine


class Policies:
    """The published policies, and the running engine calls that can move to a new version.

    Example:
        policies.publish(ServedPolicy("planner", 7, "planner@7.3fa9c2"))
        policies.current("planner").adapter
    """

    def __init__(self) -> None:
        self._current = {BASE.name: BASE}
        self._running: dict[str, _Running] = {}
        """By the request id of the call."""

    def current(self, name: str) -> ServedPolicy | None:
        """The current version; None before the policy is published."""
        return self._current.get(name)

    @property
    def published(self) -> list[ServedPolicy]:
        """All policies except the engines' own weights, by name."""
        return [self._current[name] for name in sorted(self._current) if name]

    def publish(self, served: ServedPolicy) -> list[tuple[Engine, str]]:
        """Makes this version the current one. Returns the engine and the request id of each call
        that samples from another version and can be cut."""
        self._current[served.name] = served
        return [
            (call.engine, request_id)
            for request_id, call in self._running.items()
            if call.served.name == served.name and call.served != served
        ]

    @contextmanager
    def running(self, served: ServedPolicy, engine: Engine, request_id: str) -> Iterator[None]:
        """A context in which the call can move to a new version of its policy."""
        self._running[request_id] = _Running(served, engine)
        try:
            yield
        finally:
            del self._running[request_id]
