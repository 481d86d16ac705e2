"""Stock agents that cannot be installed from a package registry: what Harbor would start them with.

Harbor clones swe-agent from a code host and builds openhands there, so neither is run. Harbor's own
classes make their commands and environments, which the tests check.
"""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.harbor_server import HARBOR
from tests.needs import needs

pytestmark = needs(
    None if (HARBOR / "bin/python").exists() else f"no {HARBOR}: make harbor (Python 3.12)"
)
ROOT = Path(__file__).resolve().parents[2]
BASE, KEY = "http://127.0.0.1:9/trial-7/v1", "sk-of-the-session"
NAMES = (
    "swe-agent",
    "openhands",
    "claude-code",
    "codex",
    "mini-swe-agent",
    "opencode",
    "qwen-coder",
)


@pytest.fixture(scope="module")
def commands() -> dict[str, list[dict[str, Any]]]:
    done = subprocess.run(
        [HARBOR / "bin/python", "-m", "tests.e2e.harbor_commands", BASE, KEY, *NAMES],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {line["agent"]: line["commands"] for line in lines}


def test_swe_agent_gets_base_url_key_and_no_limit_of_cost(
    commands: dict[str, list[dict[str, Any]]],
) -> None:
    (run,) = [c for c in commands["swe-agent"] if "sweagent run" in c["command"]]
    assert f"--agent.model.api_base={BASE}" in run["command"]
    assert "--agent.model.name=openai/policy" in run["command"]
    assert re.search(r"per_instance_cost_limit[= ]0", run["command"])
    assert run["env"]["OPENAI_API_KEY"] == KEY


def test_openhands_gets_base_url_key_and_model(commands: dict[str, list[dict[str, Any]]]) -> None:
    (run,) = [c for c in commands["openhands"] if "openhands.core.main" in c["command"]]
    said = {name: run["env"][name] for name in ("LLM_BASE_URL", "LLM_API_KEY", "LLM_MODEL")}
    assert said == {"LLM_BASE_URL": BASE, "LLM_API_KEY": KEY, "LLM_MODEL": "openai/policy"}


@pytest.mark.parametrize(
    ("agent", "url"),
    [
        ("claude-code", BASE.removesuffix("/v1")),
        ("codex", BASE),
        ("mini-swe-agent", BASE),
        ("opencode", BASE),
        ("qwen-coder", BASE),
    ],
)
def test_every_command_that_has_a_key_has_the_url(
    commands: dict[str, list[dict[str, Any]]], agent: str, url: str
) -> None:
    """In a variable, or in the file that Harbor 0.26 writes for opencode."""
    written = re.findall(r'"baseURL": "([^"]*)"', "".join(c["command"] for c in commands[agent]))
    with_key = [c["env"] for c in commands[agent] if KEY in c["env"].values()]
    assert with_key
    for env in with_key:
        urls = {value for name, value in env.items() if name.endswith(("_BASE_URL", "_API_BASE"))}
        assert urls | {*written} == {url}
