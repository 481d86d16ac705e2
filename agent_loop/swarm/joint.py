"""Episodes on several servers that end as one: an agent with several models, each in training.

Two phases. The client prepares every episode (reward and recording on disk, nothing counted), then
ends the first by name: that one decides. Then it ends the others. Invariant: all of them count or
none does. A server whose prepared episode is neither ended nor aborted in its lease asks the
deciding one, for as long as it takes; the deciding one, left prepared past its own lease, expires.
"""

from __future__ import annotations

import aiohttp

from agent_loop.swarm.wire import Decider, EpisodeState, Outcome

ASK_TIMEOUT_S = 10.0
EPISODE_KEY = "X-Episode-Key"
UNDECIDED = frozenset({EpisodeState.CLAIMED, EpisodeState.PREPARED})
NEVER = frozenset({EpisodeState.ABORTED, EpisodeState.EXPIRED})


async def outcome(decider: Decider) -> EpisodeState | None:
    """What became of the deciding episode; None: not decided, or its server does not say."""
    url = f"{decider.url.rstrip('/')}/v1/episodes/{decider.episode_id}/outcome"
    timeout = aiohttp.ClientTimeout(total=ASK_TIMEOUT_S)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout) as http,
            http.get(url, headers={EPISODE_KEY: decider.key}, allow_redirects=False) as response,
        ):
            body = await response.read()
    except (aiohttp.ClientError, TimeoutError):
        return None
    if response.status == 404:
        return EpisodeState.ABORTED  # its server never heard of it, or lost its disk
    if response.status != 200:
        return None
    state = Outcome.model_validate_json(body).state
    return None if state in UNDECIDED else state
