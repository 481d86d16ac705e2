"""The headers of a service whose API key is in an environment variable."""

from __future__ import annotations

import os

from proxy.errors import ConfigurationError


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
