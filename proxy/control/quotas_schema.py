"""The bodies of `/quotas`, the control plane of quotas that several sessions share."""

from __future__ import annotations

from pydantic import Field

from proxy.openapi import Schema


class NewQuota(Schema):
    """Body of `PUT /quotas/{name}`."""

    max_turns: int | None = Field(None, ge=0, le=2**53)
    """Number of answers; None: no limit."""
    max_tokens: int | None = Field(None, ge=0, le=2**53)
    """Number of sampled tokens; None: no limit."""
    reset: bool = False
    """Whether counting begins again at 0."""


class QuotaView(Schema):
    """A quota, and how much of it is used."""

    name: str
    max_turns: int | None
    max_tokens: int | None
    turns: int
    tokens: int


class Quotas(Schema):
    """Answer of `GET /quotas`."""

    quotas: list[QuotaView]
