"""The expert writes exactly what mini-swe-agent sends, and the verifier grades its real runs."""

import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from examples.mini_swe_agent.expert import SUBMIT, SYSTEM, TOOLS, instance, observation, transcript
from examples.mini_swe_agent.shell_tasks import REQUESTS, WORKSPACE, command, is_done
from tests.examples.openai_server import openai_server
from tests.needs import needs

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "mini_swe_agent"
MINI = ROOT / ".agents" / "python" / "bin" / "mini"
TASK = {
    "prompt": REQUESTS["sum"].format(source="apple", target="jade"),
    "kind": "sum",
    "source": "apple",
    "target": "jade",
}


@pytest.mark.parametrize("kind", REQUESTS)
def test_only_the_right_command_solves_the_task(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "work"
    shutil.copytree(WORKSPACE, folder)
    assert not is_done(folder, kind, "apple", "jade")
    subprocess.run(command(kind, "apple", "jade"), shell=True, cwd=folder, check=True)
    assert is_done(folder, kind, "apple", "jade")
    for other in set(REQUESTS) - {kind}:
        assert not is_done(folder, other, "apple", "jade")


def test_held_out_tasks_are_not_trained_on() -> None:
    prompts = {
        name: {
            json.loads(line)["prompt"]
            for line in (FOLDER / f"{name}.jsonl").read_text().splitlines()
        }
        for name in ("train", "heldout")
    }
    assert not prompts["train"] & prompts["heldout"]


def test_expert_is_right_sometimes_and_always_submits() -> None:
    rng = random.Random(0)
    ends = [transcript(rng).messages[-1]["tool_calls"][0]["function"] for _ in range(50)]
    assert all(json.loads(end["arguments"]) == {"command": SUBMIT} for end in ends)


@pytest.mark.agents
@needs(None if MINI.exists() else f"no {MINI}: make agents")
def test_real_agent_sends_what_the_expert_writes(tmp_path: Path) -> None:
    trial, work = tmp_path, tmp_path / "work"
    shutil.copytree(WORKSPACE, work)
    (trial / "task.json").write_text(json.dumps(TASK))
    steps = [command("sum", "apple", "jade"), "cat jade.txt", SUBMIT]
    with openai_server([_bash(step, number) for number, step in enumerate(steps)]) as (url, seen):
        _mini(trial, work, url)
    total = (work / "jade.txt").read_text()
    assert seen[0]["tools"] == TOOLS
    said = [(m["role"], m["content"]) for m in seen[-1]["messages"]]
    assert said == [
        ("system", SYSTEM),
        ("user", instance(TASK["prompt"])),
        ("assistant", ""),
        ("tool", observation("")),
        ("assistant", ""),
        ("tool", observation(total)),
    ]
    env = {"TASK_FILE": str(trial / "task.json"), "TRIAL_DIR": str(trial)}
    verdict = [sys.executable, str(FOLDER / "verify.py"), "submitted"]
    assert subprocess.run(verdict, cwd=work, env=env, check=False).returncode == 0
    (work / "jade.txt").write_text("0")
    assert subprocess.run(verdict, cwd=work, env=env, check=False).returncode == 1


def _bash(line: str, number: int) -> dict:
    function = {"name": "bash", "arguments": json.dumps({"command": line})}
    call = {"id": f"call_{number}", "type": "function", "function": function}
    return {"content": "", "tool_calls": [call]}


def _mini(trial: Path, work: Path, url: str) -> None:
    env = {
        "PATH": os.environ["PATH"],
        "HOME": str(trial),
        "MSWEA_CONFIGURED": "true",
        "MSWEA_COST_TRACKING": "ignore_errors",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "OPENAI_API_BASE": url,
        "OPENAI_API_KEY": "key",
    }
    arguments = ["--yolo", "--exit-immediately", "--config=mini.yaml"]
    arguments += [f"--config={FOLDER}/prompts.yaml", "--model=openai/policy"]
    arguments += [f"--task={TASK['prompt']}", f"--output={trial}/mini.json"]
    done = subprocess.run(
        [str(MINI), *arguments],
        cwd=work,
        env=env,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
