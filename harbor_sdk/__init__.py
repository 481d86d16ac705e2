"""Harbor over HTTP: `AgentRunClient`, and the requests and answers that it exchanges with a
`harbor-server`.

The client imports no other package of this project, and runs on Python 3.11 with pydantic, aiohttp
and tenacity. `harbor_sdk.trial`, `harbor_sdk.environment` and `harbor_sdk.server` need Python 3.12
and the `harbor` package.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from harbor_sdk.client import AgentRunClient as AgentRunClient
    from harbor_sdk.errors import AgentRunError as AgentRunError
    from harbor_sdk.models import AgentRun as AgentRun
    from harbor_sdk.models import AgentRunRequest as AgentRunRequest
    from harbor_sdk.models import AgentSpec as AgentSpec
    from harbor_sdk.models import EnvironmentSpec as EnvironmentSpec
    from harbor_sdk.models import RunStatus as RunStatus
    from harbor_sdk.models import VerifierSpec as VerifierSpec

    __version__: str

_MODULES = {"AgentRunClient": "client", "AgentRunError": "errors"}
"""Public names that are not in `models`."""
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


def __getattr__(name: str) -> Any:
    """Loads a public name when it is used, so that `harbor-server --help` answers at once."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "__version__":
        from importlib.metadata import version

        return version("agentic-rl")
    return getattr(import_module(f"{__name__}.{_MODULES.get(name, 'models')}"), name)
