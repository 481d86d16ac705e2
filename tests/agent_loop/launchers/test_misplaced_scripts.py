"""Scripts in `argv` that a trial would not find in its working folder are refused at the start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agent_loop.remote_agent_config import RemoteAgentConfig
from proxy.errors import ConfigurationError


def check(monkeypatch: pytest.MonkeyPatch, folder: Path, **section: Any) -> None:
    (folder / "agent.py").touch()
    (folder / "kit").mkdir()
    (folder / "kit" / "kept.py").touch()
    monkeypatch.chdir(folder)
    RemoteAgentConfig.model_validate(section).check_scripts("remote_agent")


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["python", "agent.py"], r"command.argv: 'agent.py' .* write \{root\}/agent.py"),
        (["python", "gone/agent.py"], r"'gone/agent.py' .* there is no such file there"),
        (["./agent.py"], r"'./agent.py' .* write \{root\}/./agent.py"),
        (["env", "A=1", "agent.py"], "'agent.py'"),
    ],
)
def test_relative_scripts_of_agents_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, argv: list[str], said: str
) -> None:
    with pytest.raises(ConfigurationError, match=said):
        check(monkeypatch, tmp_path, command={"argv": argv})


def test_a_relative_script_of_a_verifier_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    verifier = {"argv": ["python", "agent.py"]}
    with pytest.raises(ConfigurationError, match=r"verifier.argv: 'agent.py'"):
        check(monkeypatch, tmp_path, command={"argv": ["true"]}, verifier=verifier)


@pytest.mark.parametrize(
    "section",
    [
        {"command": {"argv": ["python", "{root}/agent.py"]}},
        {"command": {"argv": ["{python}", "-m", "agent"]}},
        {"command": {"argv": ["python", "kept.py"], "template": "kit"}},
        {"command": {"argv": ["python", "any.py"], "template": "git+{task.repo}#main"}},
        {"command": {"argv": ["true"]}, "verifier": {"argv": ["python", "solution.py"]}},
        {"command": {"argv": ["mini", "--task", "fix agent.pyx"]}},
    ],
)
def test_what_a_trial_will_find_is_accepted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, section: dict[str, Any]
) -> None:
    check(monkeypatch, tmp_path, **section)
