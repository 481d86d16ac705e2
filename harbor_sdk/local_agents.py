"""Agents of Harbor that do not download anything, for machines that reach only package registries.

claude-code and codex need no class of this module: Harbor finds them on the environment's PATH
(`environment_kwargs.path`) and does not install them. Harbor's mini-swe-agent always downloads uv,
a Python and the package; `LocalMiniSweAgent` uses the one that is installed.
"""

from __future__ import annotations

from harbor.agents.installed.mini_swe_agent import MiniSweAgent
from harbor.environments.base import BaseEnvironment


class LocalMiniSweAgent(MiniSweAgent):  # type: ignore[misc]  # harbor is not installed on 3.11
    """Harbor's mini-swe-agent, already installed on the PATH of the environment.

    In a configuration: `agent_import_path: harbor_sdk.local_agents:LocalMiniSweAgent`
    """

    async def install(self, environment: BaseEnvironment) -> None:
        found = await environment.exec("command -v mini-swe-agent")
        if found.return_code != 0:
            raise RuntimeError(
                "mini-swe-agent is not on the environment's PATH: install it on this machine "
                "(pip install mini-swe-agent mcp) and add its folder to environment_kwargs.path"
            )
