"""The bodies of `/weights`, the control plane of weights that relay workers pull."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import AfterValidator, Field, model_validator

from proxy.extras.relay.weights.publication import check_name, version_of
from proxy.http.openapi import Schema
from proxy.routing.policies import MAX_ADAPTER_CHARS

PATIENCE_S = 600.0


class NewWeights(Schema):
    """The published weights that relay workers are to serve: body of `PUT /weights`."""

    publication: Annotated[str, AfterValidator(check_name)]
    """Their folder below the URL at which they are published, `RUN/vVERSION-TIME`."""
    version: int = Field(ge=0, le=2**31 - 1)
    run: str = Field("", max_length=MAX_ADAPTER_CHARS)
    """The run that publishes them, to which they then belong; empty: they belong to none."""
    patience_s: float = Field(PATIENCE_S, ge=0, le=86400)
    """Seconds for which workers that still serve the weights before them get calls."""

    @model_validator(mode="after")
    def _has_its_version(self) -> Self:
        if version_of(self.publication) != self.version:
            raise ValueError(f"version {self.version} is not that of {self.publication}")
        return self


class TensorsView(Schema):
    """The weights that a trainer is going to publish: body of `POST /weights/types`."""

    tensors: list[tuple[str, str, list[int]]]
    """Name, trained type and shape of each."""


class HeldTypes(Schema):
    """Answer of `POST /weights/types`."""

    held_dtypes: list[list[str | None] | None]
    """As in `WeightsView`, of all workers that are connected."""


class WorkerWeights(Schema):
    """What a relay worker says about its engine's weights."""

    name: str
    connected: bool
    serves_wanted: bool
    """Whether the engine has the weights that are wanted."""
    publication: str | None
    """The published weights that it has; None: none, or it is not known."""
    version: int
    adapter: str | None
    """The engine's name of the adapter that they are; None: they are no adapter."""
    error: str | None
    """Why it does not have the wanted weights; it tries again."""
    pulled_bytes: int
    """Number of bytes that the worker read for these weights."""
    pull_s: float
    paused_s: float
    """Seconds during which the engine did not sample; 0 for an adapter."""
    difference: float | None
    """Mean |Δ log p| of engine and trainer on the probe."""


class WeightsView(Schema):
    """Answer of `GET /weights`."""

    publication: str | None
    """The weights that are wanted; None: no trainer has published any."""
    version: int | None
    settled: bool
    """Whether each worker has them, has failed to get them, or is late, and there is a worker."""
    held_dtypes: list[list[str | None] | None]
    """What the workers that have them report: the type in which the engine holds each tensor, in
    the order of the manifest, once for all that report the same; None: one cannot report it."""
    workers: list[WorkerWeights]
