"""The expert of benchmarks/rewind writes exactly what mini-swe-agent sends, and only a walk through
all right doors has a reward."""

import json
import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from agent_loop.launchers.calls import GradeCall
from benchmarks.rewind.expert import transcript
from benchmarks.rewind.house import GO, other_door
from benchmarks.rewind.verify import grade
from tests.examples.openai_server import openai_server
from tests.needs import needs

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks" / "rewind"
MINI = ROOT / ".agents" / "python" / "bin" / "mini"
HOUSES = {
    name: [json.loads(line) for line in (FOLDER / f"{name}.jsonl").read_text().splitlines()]
    for name in ("train", "eval")
}
CALL = """
import sys, json
from pathlib import Path
import agent
from agent_loop.launchers.calls import AgentCall
task = json.loads(sys.argv[1])
agent.run(AgentCall(task, task["prompt"], "policy", sys.argv[2], "key", Path.cwd(), "t", 0))
"""


def test_every_house_is_evaluated_equally_often() -> None:
    walks = Counter(tuple(house["rooms"]) for house in HOUSES["eval"])
    assert walks == {tuple(house["rooms"]): 4 for house in HOUSES["train"]}
    assert len(walks) == len(HOUSES["train"])


@pytest.mark.parametrize("wrong", [None, 0, 3, 9])
def test_every_door_must_be_right(wrong: int | None, tmp_path: Path) -> None:
    house = HOUSES["train"][0]
    doors = list(house["right"])
    if wrong is not None:
        doors[wrong] = other_door(house["rooms"][wrong], doors[wrong])
    (tmp_path / "moves").write_text("".join(f"{door}\n" for door in doors))
    assert grade(_graded(house, tmp_path)) == float(wrong is None)


def test_walk_that_ends_early_has_no_reward(tmp_path: Path) -> None:
    house = HOUSES["train"][0]
    assert grade(_graded(house, tmp_path)) == 0.0
    (tmp_path / "moves").write_text("".join(f"{door}\n" for door in house["right"][:9]))
    assert grade(_graded(house, tmp_path)) == 0.0


@pytest.mark.agents
@needs(None if MINI.exists() else f"no {MINI}: make agents")
def test_real_agent_sends_what_the_expert_writes(tmp_path: Path) -> None:
    written = transcript(random.Random(5)).messages
    said = [message for message in written if message["role"] == "assistant"]
    asked = [message["content"] for message in written if message["role"] in ("user", "tool")]
    rooms = [content.strip().splitlines()[-1] for content in asked]
    lines = [json.loads(m["tool_calls"][0]["function"]["arguments"])["command"] for m in said]
    right = [line.split()[-1] for line in lines]
    house = {"prompt": rooms[0], "rooms": rooms, "right": right}
    with openai_server(said) as (url, seen):
        subprocess.run(
            [sys.executable, "-c", CALL, json.dumps(house), url],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": f"{FOLDER}:{ROOT}"},
            check=True,
            timeout=120,
        )
    sent = [(m["role"], m["content"]) for m in seen[-1]["messages"]]
    assert sent == [(m["role"], m["content"]) for m in written[:-1]]
    assert (tmp_path / "go").read_text() == GO
    assert grade(_graded(house, tmp_path)) == 1.0


def _graded(house: dict, workspace: Path) -> GradeCall:
    return GradeCall(house, workspace, workspace / "agent.log", "exited", [])
