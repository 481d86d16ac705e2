"""Harbor over HTTP: `AgentRunClient` for a `harbor-server`, and what both speak.

Stands alone: pydantic, aiohttp and tenacity, Python 3.11. `harbor_sdk.trial`,
`harbor_sdk.environment` and `harbor_sdk.server` need Python 3.12 and the `harbor` package.
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
]
