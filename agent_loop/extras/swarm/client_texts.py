"""What clients send: the end of an episode, checked, and the trainer's configuration as YAML."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from agent_loop.extras.swarm.errors import SwarmError
from agent_loop.extras.swarm.wire import Claimed, EpisodeEnd

TrainerYaml = str | Mapping[str, Any] | BaseModel
"""YAML text, the same as a mapping, or a `trainer.config.TrainerConfig`."""


def ending(
    episode: Claimed,
    *,
    reward: float,
    task_id: str | None = None,
    reward_parts: Mapping[str, float] | None = None,
    turn_rewards: Mapping[int, float] | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> EpisodeEnd:
    """An episode's end, checked. Raises `invalid`: no task, or a reward that is not finite."""
    wanted = task_id or episode.task_id
    if wanted is None:
        raise SwarmError("task_id: missing; the claim had none, so give it at the end", "invalid")
    try:
        return EpisodeEnd(
            task_id=wanted,
            reward=reward,
            reward_parts=dict(reward_parts or {}),
            turn_rewards=dict(turn_rewards or {}),
            metadata=dict(metadata or {}),
        )
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise SwarmError(f"{where}: {first['msg']}", "invalid") from None


def config_text(config: TrainerYaml) -> str:
    """The configuration as YAML. Equal mappings, in the same order, give equal texts.

    Raises `invalid`: the mapping holds something that is not plain data.
    """
    if isinstance(config, str):
        return config
    values = config.model_dump(mode="json") if isinstance(config, BaseModel) else dict(config)
    try:
        return yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
    except yaml.representer.RepresenterError as error:
        raise SwarmError(
            f"the configuration holds {error.args[-1]!r}; use only text, numbers, lists and "
            "dictionaries",
            "invalid",
        ) from None
