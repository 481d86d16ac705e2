"""Episodes on several servers that end together: an agent with several models, each in training.

The end has two phases. First the client prepares every episode: its reward and its recording are on
disk, and it does not count yet. Then the client ends the episodes, beginning with the one whose
name comes first, which decides. Invariant: all of them count, or none does. A server whose prepared
episode is neither ended nor aborted within its lease asks the deciding server until it gets an
answer. The deciding episode expires if it is still prepared when its own lease runs out.
"""

from __future__ import annotations

import aiohttp
import orjson

from agent_loop.extras.swarm.episode import OPEN
from agent_loop.extras.swarm.wire import Decider, EpisodeOutcome, EpisodeState
from proxy.machine.direct_hosts import proxy_for

ASK_TIMEOUT_S = 10.0
EPISODE_KEY = "X-Episode-Key"


async def outcome(decider: Decider) -> EpisodeState | None:
    """What became of the deciding episode; None: undecided, or its server gives no answer."""
    url = f"{decider.url.rstrip('/')}/v1/episodes/{decider.episode_id}/outcome"
    timeout = aiohttp.ClientTimeout(total=ASK_TIMEOUT_S)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout, proxy=proxy_for(url)) as http,
            http.get(url, headers={EPISODE_KEY: decider.key}, allow_redirects=False) as response,
        ):
            body = await response.read()
    except (aiohttp.ClientError, TimeoutError):
        return None
    if response.status == 404 and _is_of_a_swarm(body):
        return EpisodeState.ABORTED  # its server never knew the episode, or lost its disk
    if response.status != 200:
        return None
    state = EpisodeOutcome.model_validate_json(body).state
    return None if state in OPEN else state


def _is_of_a_swarm(body: bytes) -> bool:
    """Whether a swarm server has answered that there is no such episode, not what is before it."""
    try:
        return bool(orjson.loads(body)["error"]["code"] == "not_found")
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return False
