"""What the sandbox hides from a run's agents."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from agent_loop.launchers.command import CommandConfig, CommandLauncher
from agent_loop.records import Task
from agent_loop.remote_agent_config import RemoteAgentConfig
from agent_loop.remote_agent_loop import RemoteAgentLoop
from agent_loop.rewards.verifier import VerifierConfig
from proxy import wall
from proxy.errors import ConfigurationError
from proxy.records import SessionKind
from tests.proxy.conftest import RunningProxy

THIEF = """
import json, os, pathlib, urllib.request
from contextlib import suppress
seen = {}
for name in ("run", "verifier", "tasks"):
    path = pathlib.Path(os.environ[name.upper()])
    seen[name] = sorted(p.name for p in path.rglob("*")) if path.is_dir() else path.read_text()
seen["task"] = json.loads(pathlib.Path(os.environ["TASK_FILE"]).read_text())
seen["processes"] = sorted(p.name for p in pathlib.Path("/proc").glob("[0-9]*"))
with suppress(PermissionError):
    seen["environment of process 1"] = pathlib.Path("/proc/1/environ").read_text()
pathlib.Path(os.environ["TASK_FILE"]).write_text('{"answer": "0"}')
pathlib.Path("seen.json").write_text(json.dumps(seen))
body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "Hi"}]}).encode()
call = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body,
    {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"})
urllib.request.urlopen(call).read()
"""
VERIFY = """import json, os, sys
task = json.load(open(os.environ["TASK_FILE"]))
sys.exit(task["answer"] != "42")
"""


async def test_agent_cannot_reach_the_run_the_verifier_or_the_answers(
    proxy: RunningProxy, tmp_path: Path
) -> None:
    run, verifier, tasks = tmp_path / "run", tmp_path / "verify.py", tmp_path / "train.jsonl"
    (run / "trials" / "other").mkdir(parents=True)
    (run / "sessions.db").write_text("recorded")
    verifier.write_text(VERIFY)
    tasks.write_text('{"answer": "42"}')
    config = RemoteAgentConfig(
        command=CommandConfig(
            argv=(sys.executable, "-I", "-S", "-c", THIEF),
            env={"RUN": str(run), "VERIFIER": str(verifier), "TASKS": str(tasks)},
        ),
        verifier=VerifierConfig(argv=("{python}", str(verifier))),
        keep_workspaces=True,
        max_retries=0,
    )
    assert config.command is not None
    loop = RemoteAgentLoop(
        proxy.control,
        CommandLauncher(config.command),
        config.build_rewards(),
        run / "trials",
        trial=config,
        hidden=(run, tasks, *config.private_files),
    )
    task = Task("sum", {"prompt": "6 * 7", "answer": "42"})
    rollout = await loop.run(task, kind=SessionKind.TRAIN)
    await loop.close()
    assert rollout.error is None, (Path(rollout.logs or "") / "agent.log").read_text()
    assert rollout.reward == 1.0  # the verifier reads its own copy of the task
    seen = json.loads((Path(rollout.logs or "") / "work" / "seen.json").read_text())
    assert "sessions.db" not in seen["run"]
    assert "other" not in seen["run"]
    assert seen["verifier"] == ""
    assert seen["tasks"] == ""
    assert seen["task"] == {"prompt": "6 * 7"}
    assert seen["processes"] == ["1", "2"]
    assert "environment of process 1" not in seen


def test_agent_whose_launcher_gives_the_reward_gets_all_fields_of_the_task() -> None:
    own = RemoteAgentConfig.model_validate({"python": {"target": "json:loads"}})
    graded = RemoteAgentConfig.model_validate(
        {"python": {"target": "json:loads"}, "grader": {"target": "json:dumps"}}
    )
    assert own.fields_hidden == frozenset()
    assert "answer" in graded.fields_hidden


def test_file_that_agent_and_verifier_share_stays_visible(tmp_path: Path) -> None:
    shared = tmp_path / "both.py"
    shared.write_text("")
    config = RemoteAgentConfig.model_validate(
        {
            "command": {"argv": ["python3", str(shared), "solve"]},
            "verifier": {"argv": ["python3", str(shared), "verify"]},
        }
    )
    assert config.private_files == []


def test_machine_without_namespaces_is_refused_with_a_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(wall, "missing", lambda: "Operation not permitted")
    agent = {"command": {"argv": ["true"]}}
    with pytest.raises(ConfigurationError, match=r"not permitted.*remote_agent\.sandbox=off"):
        RemoteAgentConfig.model_validate(agent).check_sandbox()
    RemoteAgentConfig.model_validate(agent | {"sandbox": "off"}).check_sandbox()


def test_grader_in_a_file_is_private_and_the_agents_own_file_is_not(tmp_path: Path) -> None:
    for name in ("agent.py", "verify.py"):
        (tmp_path / name).touch()
    config = RemoteAgentConfig.model_validate(
        {
            "python": {"target": f"{tmp_path}/agent.py:run"},
            "grader": {"target": f"{tmp_path}/verify.py:grade"},
        }
    )
    assert config.private_files == [tmp_path / "verify.py"]
