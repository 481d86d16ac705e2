"""What happens to a group that is older than `max_staleness` allows.

Invariant: staleness (the trainer's version minus the oldest version that sampled a trained token)
is at most `max_staleness` in every batch that the trainer gets: an older group is dropped, or its
stale tokens become context that is not trained. Such tokens still count for what the others are
compared with: the advantages of the tokens that are left do not depend on which others are stale.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from agent_loop.producers.groups import is_large_enough
from agent_loop.producers.rollout_config import RolloutConfig
from agent_loop.records import Group, Rollout


def is_stale(oldest_version: int, version: int, config: RolloutConfig) -> bool:
    """Whether tokens of `oldest_version` are too old for the trainer at `version`."""
    return version - oldest_version > config.max_staleness


def is_cancelled(oldest_start: int | None, version: int, config: RolloutConfig) -> bool:
    """Whether a running group is cancelled at an update to `version`. `oldest_start` is the oldest
    version at which one of its running trials began; None: no trial runs."""
    if oldest_start is None:
        return False
    if not config.partial_rollout:
        return True
    return config.stale == "drop" and is_stale(oldest_start, version, config)


def fresh_part(group: Group, version: int, config: RolloutConfig) -> Group | None:
    """The group, without stale tokens where `stale` is `mask`; None: it is dropped, because it is
    stale and `stale` is `drop`, or because too little of it would be left to train."""
    if not is_stale(group.oldest_version, version, config):
        return group
    if config.stale == "drop":
        return None
    masked = _without_stale_tokens(group, version - config.max_staleness)
    return masked if is_large_enough(masked, config) else None


def _without_stale_tokens(group: Group, oldest_allowed: int) -> Group:
    """The group, with tokens of versions before `oldest_allowed` as context that is not trained."""

    def fresh(rollout: Rollout) -> Rollout:
        segments, stale = [], Counter(rollout.stale_turns)
        for segment in rollout.segments:
            is_fresh = segment.versions >= oldest_allowed
            stale.update(segment.turns[segment.mask & ~is_fresh].tolist())
            segments.append(segment.training_only(is_fresh))
        return replace(rollout, segments=tuple(segments), stale_turns=dict(stale))

    return replace(group, rollouts=tuple(map(fresh, group.rollouts)))
