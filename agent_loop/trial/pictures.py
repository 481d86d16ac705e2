"""The images of a rollout, as its agent sent them, for trainers that read images.

Invariant: a rollout has the bytes of every image in its segments before it enters a group, so that
they are as durable as its tokens, and no longer kept.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace

from agent_loop.records import Rollout

Fetch = Callable[[str], Awaitable[bytes]]
"""sha256 → the bytes of an image of the trial's session, which have it."""


async def with_pictures(rollout: Rollout, fetch: Fetch) -> Rollout:
    """The rollout with the bytes of its images. Raises what `fetch` raises."""
    named = {image.sha256 for segment in rollout.segments for image in segment.images}
    if not named:
        return rollout
    return replace(rollout, pictures={name: await fetch(name) for name in sorted(named)})
