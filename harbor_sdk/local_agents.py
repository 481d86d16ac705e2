"""Harbor's agents without their download: for machines that reach package registries alone.

claude-code and codex need none of this: Harbor's own find themselves on the environment's PATH
(`environment_kwargs.path`) and install nothing. mini-swe-agent's `install()` always fetches uv, a
Python and the package; here it is expected to be there.
"""

from __future__ import annotations

from harbor.agents.installed.mini_swe_agent import MiniSweAgent
from harbor.environments.base import BaseEnvironment


class LocalMiniSweAgent(MiniSweAgent):  # type: ignore[misc]  # harbor is not installed on 3.11
    """`agent_import_path: harbor_sdk.local_agents:LocalMiniSweAgent`"""

    async def install(self, environment: BaseEnvironment) -> None:
        found = await environment.exec("command -v mini-swe-agent")
        if found.return_code != 0:
            raise RuntimeError(
                "mini-swe-agent is not on the environment's PATH: install it on this machine "
                "(pip install mini-swe-agent mcp) and put its folder into environment_kwargs.path"
            )
