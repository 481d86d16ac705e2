"""The agent: mini-swe-agent from PyPI, unmodified, called through its Python API.

The module imports it from the virtual environment in which `make agents` installs it, once; each
trial is a fork of that process, and its commands are executed in the trial's own folder.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import yaml
from house import END, GO

if TYPE_CHECKING:
    from agent_loop.launchers.calls import AgentCall

ROOT = Path(__file__).resolve().parents[2]
# Behind our own packages, which are compatible with mini-swe-agent's.
sys.path += map(str, (ROOT / ".agents/python/lib").glob("python3*/site-packages"))
os.environ |= {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "MSWEA_CONFIGURED": "true",
    "MSWEA_COST_TRACKING": "ignore_errors",
    "MSWEA_GLOBAL_CONFIG_DIR": "/nonexistent",
    "MSWEA_SILENT_STARTUP": "1",
}

import httpx  # noqa: E402
import litellm  # noqa: E402
import litellm.responses.mcp.chat_completions_handler  # noqa: E402 (else imported in each fork)
from minisweagent.agents.default import DefaultAgent  # noqa: E402
from minisweagent.environments.local import LocalEnvironment  # noqa: E402
from minisweagent.models.litellm_model import LitellmModel  # noqa: E402
from openai import OpenAI  # noqa: E402

# Each fork would otherwise read certificates, and import these parts, in its first call: 0.1 s of
# processor time.
litellm.client_session = httpx.Client(timeout=120)
litellm.completion("gpt-4o", [{"role": "user", "content": "-"}], mock_response="-")
OpenAI(api_key="-", http_client=litellm.client_session).chat.completions  # noqa: B018

PROMPTS = yaml.safe_load(Path(__file__).with_name("prompts.yaml").read_text(encoding="utf-8"))


def run(call: AgentCall) -> None:
    """Builds the house in the trial's folder, and lets the agent walk through it."""
    (call.workspace / "rooms").write_text(
        "\n".join([*call.task["rooms"], END]) + "\n", encoding="utf-8"
    )
    go = call.workspace / "go"
    go.write_text(GO, encoding="utf-8")
    go.chmod(0o755)
    model = LitellmModel(
        model_name=f"openai/{call.model}",
        model_kwargs={"api_base": call.base_url, "api_key": call.api_key},
        **PROMPTS["model"],
    )
    agent = DefaultAgent(model, LocalEnvironment(cwd=str(call.workspace)), **PROMPTS["agent"])
    print(agent.run(call.prompt))
