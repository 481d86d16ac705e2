"""Answers of the proxy's control plane, as `ProxyClient` returns them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class SessionHandle:
    """What an agent needs. Example: SessionHandle("t-1", "sk-…", "http://127.0.0.1:8000/t-1/v1",
    "http://127.0.0.1:8000/t-1", 1.78e9)"""

    trial_id: str
    api_key: str
    base_url: str
    """For OPENAI_BASE_URL: ends in `/v1`."""
    anthropic_base_url: str
    """For ANTHROPIC_BASE_URL: without `/v1`."""
    expires_at: float
    """Unix seconds."""


@dataclass(frozen=True, slots=True)
class Happening:
    """What the page in the browser gets, live. Example: Happening("17.16.3", {"begun": [], …})"""

    position: str
    """For `watch`, to go on after this."""
    news: dict[str, Any] | None = None
    """Turns that began (`begun`) or ended (`answered`), and `events`."""
    state: dict[str, Any] | None = None
    """The engines, and how many calls wait."""
