"""Agent profiles: what one family of agents does to its history, as data (`profiles.yaml`)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from importlib import resources
from typing import Literal

import yaml
from pydantic import BaseModel, ConfigDict, field_validator

from proxy.conversation import Conversation
from proxy.errors import RequestError


class AgentProfile(BaseModel):
    """One entry of `profiles.yaml`; a configuration's own are of the same form."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    history: Literal["keep", "follow"] = "keep"
    """`keep` what was sampled before the model's eyes, or `follow` what the agent sends."""
    scrub: tuple[re.Pattern[str], ...] = ()
    """Removed from system text: it changes with every request."""
    agents: tuple[str, ...] = ()
    """Headers that name the sub-agent."""

    @field_validator("agents")
    @classmethod
    def _lower(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(name.lower() for name in names)

    @property
    def follows(self) -> bool:
        return self.history == "follow"

    def scrubbed(self, conversation: Conversation) -> Conversation:
        """Without what `scrub` matches, and without system messages that held nothing else."""
        kept = []
        for message in conversation.messages:
            if message.role == "system" and message.text:
                text = message.text
                for pattern in self.scrub:
                    text = pattern.sub("", text)
                if not text:
                    continue
                if text != message.text:
                    message = replace(message, text=text)
            kept.append(message)
        if conversation.messages and not kept:
            raise RequestError("messages: one with some text is wanted", param="messages")
        conversation.messages = kept
        return conversation


class Profiles:
    def __init__(self, own: Mapping[str, AgentProfile]) -> None:
        """`own` are the configuration's; they come before those that ship with the proxy."""
        shipped = yaml.safe_load(resources.files("proxy").joinpath("profiles.yaml").read_text())
        known = {name: AgentProfile.model_validate(entry) for name, entry in shipped.items()}
        self._profiles = {**known, **own}

    def get(self, name: str) -> AgentProfile:
        """Raises RequestError for a name that is not known."""
        profile = self._profiles.get(name)
        if profile is None:
            raise RequestError(
                f"profile: {name[:80]!r} is not known; one of {', '.join(self._profiles)}",
                param="profile",
            )
        return profile
