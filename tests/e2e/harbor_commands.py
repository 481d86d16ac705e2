"""Run by Harbor's Python: the commands and variables with which Harbor would start its agents.

    .harbor/bin/python tests/e2e/harbor_commands.py BASE_URL KEY NAME…      one JSON line an agent

Each agent is Harbor's own, made by Harbor's factory from the result of `harbor_sdk.agents.connect`.
Only the environment is a stand-in: it records the commands that it should run.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from harbor.agents.factory import AgentFactory
from harbor.environments.base import ExecResult
from harbor.models.agent.context import AgentContext
from harbor.models.trial.config import AgentConfig

from harbor_sdk.agents import connect
from harbor_sdk.models import AgentSpec


class NotingEnvironment:
    """An environment in which every command succeeds without output."""

    default_user = None

    def __init__(self) -> None:
        self.commands: list[dict[str, Any]] = []

    async def exec(self, command: str, env: dict[str, str] | None = None, **_: Any) -> ExecResult:
        self.commands.append({"command": command, "env": env or {}})
        # Harbor 0.26 asks for the user to whom it gives Codex's home.
        said = "\nCODEX_RUNTIME_ID 0 0\n" if "CODEX_RUNTIME_ID" in command else ""
        return ExecResult(stdout=said, stderr="", return_code=0)

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        self.commands.append({"command": Path(source_path).read_text(), "env": {}})

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        pass

    async def is_file(self, path: str, **_: Any) -> bool:
        return False

    async def is_dir(self, path: str, **_: Any) -> bool:
        return False


async def noted(name: str, base_url: str, key: str) -> list[dict[str, Any]]:
    spec = connect(AgentSpec(name=name, model_name="policy"), base_url, key)
    config = AgentConfig(**spec.model_dump(exclude={"llm_proxy_url"}))
    environment = NotingEnvironment()
    with tempfile.TemporaryDirectory() as folder:
        agent = AgentFactory.create_agent_from_config(config, logs_dir=Path(folder))
        await agent.run("Do it.", environment, AgentContext())
    return environment.commands


def main(base_url: str, key: str, *names: str) -> None:
    for name in names:
        print(json.dumps({"agent": name, "commands": asyncio.run(noted(name, base_url, key))}))


if __name__ == "__main__":
    main(*sys.argv[1:])
