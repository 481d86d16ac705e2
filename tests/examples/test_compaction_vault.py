"""The expert of benchmarks/compaction writes exactly what LangChain's agent sends, and only the
code words in their order have a reward."""

import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

from agent_loop.launchers.calls import GradeCall
from benchmarks.compaction.expert import TOOLS, transcript
from benchmarks.compaction.vault import ROOMS, listed, new_vault, other_word
from benchmarks.compaction.verify import grade
from examples.starter_model.transcripts import Transcript
from tests.examples.openai_server import openai_server
from tests.needs import needs

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks" / "compaction"
LANGCHAIN = next((ROOT / ".agents/frameworks/lib").glob("python3*/site-packages/langchain"), None)
CALL = """
import sys, json
from pathlib import Path
import agent
from agent_loop.launchers.calls import AgentCall
task = json.loads(sys.argv[1])
agent.run(AgentCall(task, task["prompt"], "policy", sys.argv[2], "key", Path.cwd(), "t", 0))
"""


def test_no_vault_is_both_trained_and_evaluated() -> None:
    vaults = [
        tuple(json.loads(line)["rooms"])
        for name in ("train", "eval")
        for line in (FOLDER / f"{name}.jsonl").read_text().splitlines()
    ]
    assert len(set(vaults)) == len(vaults) == 64 + 32


@pytest.mark.parametrize("wrong", [None, 0, 3])
def test_every_word_must_be_right(wrong: int | None, tmp_path: Path) -> None:
    vault = new_vault(random.Random(1))
    words = list(vault["words"])
    if wrong is not None:
        words[wrong] = other_word(vault["rooms"][wrong], words[wrong])
    (tmp_path / "said").write_text(listed(words))
    assert grade(_graded(vault, tmp_path)) == float(wrong is None)


def test_silence_has_no_reward(tmp_path: Path) -> None:
    assert grade(_graded(new_vault(random.Random(1)), tmp_path)) == 0.0


@pytest.mark.agents
@needs(None if LANGCHAIN else "no LangChain in .agents/frameworks: make agents")
@pytest.mark.parametrize("limit", ["on", "off"])
def test_real_agent_sends_what_the_expert_writes(limit: str, tmp_path: Path) -> None:
    """With a limit, the requests are those of the three kinds of transcripts; call ids differ."""
    rng = random.Random(4)
    written = [transcript(rng) for _ in range(40)]
    whole = next(t for t in written if _is_whole(t))
    vault = {
        "prompt": whole.messages[1]["content"],
        "rooms": [m["content"] for m in whole.messages if m["role"] == "tool"][:ROOMS],
    }
    answers = [m for m in whole.messages if m["role"] == "assistant"]
    summary = next(t for t in written if not t.tools)
    if limit == "on":
        answers.insert(ROOMS, summary.messages[-1])
    with openai_server(answers) as (url, seen):
        subprocess.run(
            [sys.executable, "-c", CALL, json.dumps(vault), url],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": f"{FOLDER}:{ROOT}", "HISTORY_LIMIT": limit},
            check=True,
            timeout=120,
        )
    assert (tmp_path / "said").read_text() == json.loads(
        answers[-1]["tool_calls"][0]["function"]["arguments"]
    )["words"]
    assert len(seen) == len(answers)
    if limit == "off":
        assert _texts(seen[-1]["messages"]) == _texts(whole.messages[:-1])
        assert seen[-1]["tools"] == TOOLS
        return
    asked = seen[ROOMS]
    assert "tools" not in asked
    assert _shape(asked["messages"][0]["content"]) == _shape(summary.messages[0]["content"])
    after = next(t for t in written if t.tools and not _is_whole(t))
    assert seen[-1]["tools"] == TOOLS
    sent, expected = _texts(seen[-1]["messages"]), _texts(after.messages[:-1])
    assert [role for role, _ in sent] == [role for role, _ in expected]
    assert [_shape(text) for _, text in sent] == [_shape(text) for _, text in expected]


def _is_whole(transcript: Transcript) -> bool:
    return bool(transcript.tools) and transcript.messages[1]["content"] == "Go."


def _texts(messages: list[dict]) -> list[tuple[str, str]]:
    return [(message["role"], message["content"] or "") for message in messages]


def _shape(text: str) -> str:
    """The text without what differs by chance: words, the order of a room's, ids of calls."""
    text = re.sub(r"call_[0-9a-f]+", "ID", text)
    text = re.sub(r"(Code word|Carpet): \w+\. (Code word|Carpet): \w+\.", "WORDS", text)
    return re.sub(r"room (\d) \w+", r"room \1", text)


def _graded(vault: dict, workspace: Path) -> GradeCall:
    return GradeCall(vault, workspace, workspace / "agent.log", "exited", [])
