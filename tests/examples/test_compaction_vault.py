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
from benchmarks.compaction.expert import NOT_NOTED, NOT_SAID, TOOLS, transcript
from benchmarks.compaction.vault import ROOMS, WORDS, new_vault, seen
from benchmarks.compaction.verify import grade
from examples.starter_model.transcripts import Transcript
from proxy.token_tree.fork_cause import MIN_QUOTE_CHARS
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
call = AgentCall(task, task["prompt"], "policy", sys.argv[2], "key", Path.cwd(), "t", 0)
getattr(agent, sys.argv[3])(call)
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
    words = dict(zip(ROOMS, vault["words"], strict=True))
    if wrong is not None:
        words[ROOMS[wrong]] = NOT_SAID
    (tmp_path / "said").write_text(seen(words))
    assert grade(_graded(vault, tmp_path)) == float(wrong is None)


def test_silence_has_no_reward(tmp_path: Path) -> None:
    assert grade(_graded(new_vault(random.Random(1)), tmp_path)) == 0.0


def test_summary_is_long_enough_to_be_recognised() -> None:
    """A summary of which no line counts as a quotation would be trained in every arm."""
    shortest = min([*WORDS, NOT_NOTED], key=len)
    assert len(seen(dict.fromkeys(ROOMS[:-1], shortest))) >= MIN_QUOTE_CHARS


@pytest.mark.agents
@needs(None if LANGCHAIN else "no LangChain in .agents/frameworks: make agents")
@pytest.mark.parametrize("function", ["run", "run_without_limit"])
def test_real_agent_sends_what_the_expert_writes(function: str, tmp_path: Path) -> None:
    """With a limit, the requests are those of the three kinds of transcripts; call ids differ."""
    rng = random.Random(4)
    written = [transcript(rng) for _ in range(40)]
    whole = next(t for t in written if _is_whole(t))
    vault = {
        "prompt": whole.messages[1]["content"],
        "rooms": [m["content"] for m in whole.messages if m["role"] == "tool"][: len(ROOMS)],
    }
    answers = [m for m in whole.messages if m["role"] == "assistant"]
    summary = next(t for t in written if not t.tools)
    if function == "run":
        answers.insert(len(ROOMS), summary.messages[-1])
    with openai_server(answers) as (url, requests):
        subprocess.run(
            [sys.executable, "-c", CALL, json.dumps(vault), url, function],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": f"{FOLDER}:{ROOT}"},
            check=True,
            timeout=120,
        )
    assert (tmp_path / "said").read_text() == json.loads(
        answers[-1]["tool_calls"][0]["function"]["arguments"]
    )["words"]
    assert len(requests) == len(answers)
    if function == "run_without_limit":
        assert _texts(requests[-1]["messages"]) == _texts(whole.messages[:-1])
        assert requests[-1]["tools"] == TOOLS
        return
    asked = requests[len(ROOMS)]
    assert "tools" not in asked
    assert _shape(asked["messages"][0]["content"]) == _shape(summary.messages[0]["content"])
    after = next(t for t in written if t.tools and not _is_whole(t))
    assert requests[-1]["tools"] == TOOLS
    sent, expected = _texts(requests[-1]["messages"]), _texts(after.messages[:-1])
    assert [role for role, _ in sent] == [role for role, _ in expected]
    assert [_shape(text) for _, text in sent] == [_shape(text) for _, text in expected]


def _is_whole(transcript: Transcript) -> bool:
    return bool(transcript.tools) and transcript.messages[1]["content"] == "Go."


def _texts(messages: list[dict]) -> list[tuple[str, str]]:
    return [(message["role"], message["content"] or "") for message in messages]


def _shape(text: str) -> str:
    """The text without what differs by chance: words and ids of calls."""
    text = re.sub(r"call_[0-9a-f]+", "ID", text)
    return re.sub(rf"({'|'.join(ROOMS)}) \w+", r"\1 WORD", text)


def _graded(vault: dict, workspace: Path) -> GradeCall:
    return GradeCall(vault, workspace, workspace / "agent.log", "exited", [])
