"""Requests to another model's API, for judges: one call of OpenAI's Chat Completions, and the
headers of a service whose key is in an environment variable.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import aiohttp
import orjson

from agent_loop.errors import ChatError
from proxy.errors import ConfigurationError
from proxy.settings.section import Section


class BearerKey(Section):
    """The key of the sections that name a service with a key."""

    api_key_env: str | None = None
    """Name of the environment variable that holds the bearer token, or API key, of the service."""


def json_headers(setting: str, variable: str | None, key: str) -> dict[str, str]:
    """The headers of a JSON request, with the value of `variable` as a bearer token.

    `setting` is the setting that names the variable (None: no token), `key` says whose key it is.

    Raises:
        ConfigurationError: the variable is not set.
    """
    headers = {"Content-Type": "application/json"}
    if variable is None:
        return headers
    if variable not in os.environ:
        raise ConfigurationError(
            f"{setting}: the variable {variable!r} is not set; export it with {key}"
        )
    return headers | {"Authorization": f"Bearer {os.environ[variable]}"}


HTTP_OK = 200


async def chat_completion(
    http: aiohttp.ClientSession,
    base_url: str,
    headers: Mapping[str, str],
    body: Mapping[str, Any],
    timeout_s: float,
) -> str:
    """The text of the answer. `base_url` ends with `/v1`.

    Raises:
        ChatError: no answer in time, an error of the server, an answer that was cut off, or another
            one than a completion.
    """
    url = f"{base_url}/chat/completions"
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    try:
        async with http.post(
            url, data=orjson.dumps(body), headers=headers, timeout=timeout
        ) as response:
            raw = await response.read()
            if response.status != HTTP_OK:
                raise ChatError(f"{url} answered {response.status}: {raw[:200]!r}")
            choice = orjson.loads(raw)["choices"][0]
            if choice.get("finish_reason") == "length":
                raise ChatError(f"{url}: the answer was cut off at max_tokens")
            return str(choice["message"]["content"])
    except (aiohttp.ClientError, TimeoutError) as error:
        raise ChatError(f"{url} did not answer: {error!r}") from error
    except (orjson.JSONDecodeError, LookupError, TypeError) as error:
        raise ChatError(f"{url} returned no chat completion: {error!r}") from error
