"""terminus-2 of the package `harbor`, in this trial's own workspace instead of a container.

Run by the Python in which Harbor is installed.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

from harbor.agents.terminus_2.terminus_2 import Terminus2
from harbor.environments.base import ExecResult
from harbor.models.agent.context import AgentContext

LOGS = "/logs/agent"
"""Where Harbor's containers have the agent's logs."""


class Workspace:
    """What terminus-2 uses of Harbor's environments."""

    default_user = None
    session_id = "trial"

    def __init__(self, logs: Path) -> None:
        self._logs = str(logs)

    async def exec(self, command: str, **_: Any) -> ExecResult:
        process = await asyncio.create_subprocess_shell(
            command.replace(LOGS, self._logs),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, error = await process.communicate()
        return ExecResult(
            stdout=out.decode(errors="replace"),
            stderr=error.decode(errors="replace"),
            return_code=process.returncode or 0,
        )

    async def is_dir(self, path: str, **_: Any) -> bool:
        return Path(path).is_dir()


async def main(prompt: str) -> None:
    logs = Path(os.environ["HOME"], "terminus")
    logs.mkdir(parents=True, exist_ok=True)
    agent = Terminus2(
        logs_dir=logs,
        model_name=f"openai/{os.environ['OPENAI_MODEL']}",
        api_base=os.environ["OPENAI_BASE_URL"],
        record_terminal_session=False,
        model_info={"max_input_tokens": 131_072, "max_output_tokens": 16_384},
    )
    workspace: Any = Workspace(logs)
    await agent.setup(workspace)
    try:
        await agent.run(prompt, workspace, AgentContext())
    finally:
        await workspace.exec("tmux kill-server")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
