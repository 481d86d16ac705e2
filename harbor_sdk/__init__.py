"""Harbor over HTTP: `AgentRunClient`, and the requests and answers that it exchanges with a
`harbor-server`.

The client imports no other package of this project, and runs on Python 3.11 with pydantic, aiohttp
and tenacity. `harbor_sdk.trial`, `harbor_sdk.environment` and `harbor_sdk.server` need Python 3.12
and the `harbor` package.
"""

from harbor_sdk.client import AgentRunClient
from harbor_sdk.errors import AgentRunError
from harbor_sdk.models import (
    AgentRun,
    AgentRunRequest,
    AgentSpec,
    EnvironmentSpec,
    RunStatus,
    VerifierSpec,
)

__all__ = [
    "AgentRun",
    "AgentRunClient",
    "AgentRunError",
    "AgentRunRequest",
    "AgentSpec",
    "EnvironmentSpec",
    "RunStatus",
    "VerifierSpec",
    "__version__",
]


def __getattr__(name: str) -> str:
    """The version, read from the package's metadata when it is used."""
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib.metadata import version

    return version("agentic-rl")
