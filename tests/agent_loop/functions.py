"""Agents and graders that are Python functions, for the tests of their launcher and grader."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
import time
from typing import Any

from agent_loop.launchers.calls import AgentCall, GradeCall

state: list[str] = []


def reads_its_environment(call: AgentCall) -> float:
    assert os.environ["OPENAI_BASE_URL"] == call.base_url
    assert os.environ["OPENAI_API_KEY"] == call.api_key
    assert os.getcwd() == str(call.workspace)
    print("asked:", call.prompt)
    return 0.5


async def awaits(call: AgentCall) -> dict[str, float]:
    await asyncio.sleep(0)
    return {"reward": 1.0, "speed": 0.25}


def fails(call: AgentCall) -> None:
    raise KeyError("no such thing")


def exits_with_a_message(call: AgentCall) -> None:
    sys.exit("no such agent")


def closes_its_streams(call: AgentCall) -> float:
    sys.stdout.close()
    sys.stderr.close()
    return 0.5


def replaces_its_streams(call: AgentCall) -> float:
    sys.stdout = None
    sys.stderr = object()
    return 0.5


def fails_without_streams(call: AgentCall) -> float:
    replaces_its_streams(call)
    raise KeyError("no such thing")


def returns_scalars(call: AgentCall) -> dict[str, Any]:
    import numpy as np

    return {"reward": np.float32(0.5), "solved": np.bool_(True), "steps": np.int64(3)}


def returns_an_array(call: AgentCall) -> Any:
    import numpy as np

    return np.zeros(2)


def returns_an_object(call: AgentCall) -> Any:
    return object()


def leaves_state(call: AgentCall) -> float:
    state.append(call.trial_id)
    return float(len(state))


def draws(call: AgentCall) -> float:
    return random.random()


def hangs_with_a_child(call: AgentCall) -> None:
    child = subprocess.Popen(["sleep", "600"], start_new_session=True)
    (call.workspace / "child.tmp").write_text(str(child.pid))
    (call.workspace / "child.tmp").rename(call.workspace / "child.pid")
    time.sleep(600)


def returns_nan(call: AgentCall) -> float:
    return float("nan")


def exact_answer(call: GradeCall) -> float:
    return float(call.answers[-1]["content"] == call.task["answer"])


def gives_no_reward(call: GradeCall) -> None:
    return None


def raises(call: GradeCall) -> float:
    raise RuntimeError("grader is broken")


def hangs(call: GradeCall) -> float:
    time.sleep(600)
    return 1.0


def prints_its_region(call: AgentCall) -> float:
    print("x" * 100_000)
    return float(os.environ.get("REGION") == "eu")


def grades_its_region(call: GradeCall) -> dict[str, float]:
    return {"reward": 0.0, "region": float(os.environ.get("REGION") == "eu")}


def replaces_its_result(call: AgentCall) -> float:
    result = call.workspace.parent / "returned.json"
    said = []
    for attempt in (result.unlink, lambda: os.replace(call.workspace / "link", result)):
        (call.workspace / "link").unlink(missing_ok=True)
        (call.workspace / "link").symlink_to(os.environ["VICTIM"])
        try:
            attempt()
        except OSError as error:
            said.append(f"{error.strerror}\n")
    shell = [sys.executable, "-I", "-S", "-c", f"open('/proc/{os.getpid()}/mem', 'rb').read(0)"]
    if subprocess.run(shell, capture_output=True).returncode != 0:
        said.append("a program that it starts cannot read its memory\n")
    (call.workspace / "attempts").write_text("".join(said))
    return 0.5
