"""The expert of an example writes what the real agent sends: the tokens that the proxy records for
an agent that gets the expert's calls are those of the expert's transcript."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path

import pytest
from renderers import Qwen3RendererConfig, create_renderer
from transformers import AutoTokenizer

from agent_loop.launchers.command import CommandLauncher
from agent_loop.records import Task
from agent_loop.remote_agent_loop import RemoteAgentLoop
from agent_loop.rewards.verifier import Verifier, VerifierConfig
from agent_loop.trial.config import TrialConfig
from examples.claude_code import expert as claude_code
from examples.codex import expert as codex
from examples.repositories.tasks import File, is_done, new_repository, new_task
from examples.starter_model.transcripts import Transcript, completion_ids, encode
from proxy.config import RenderingConfig
from proxy.records import SessionKind
from proxy.rendering.rendering import Rendering
from proxy.rendering.tokenizer import load_tokenizer
from proxy.token_tree.paths import path
from tests.needs import needs
from tests.proxy.conftest import starting_proxies
from trainer.settings.sources import load

ROOT = Path(__file__).parents[3]
AGENTS = ROOT / ".agents"

Played = Callable[[list[File], dict[str, str], random.Random], Transcript]
EXPERTS: dict[str, Played] = {
    "claude_code": lambda repository, task, rng: claude_code.played(
        repository, task, date.today(), rng
    ),
    "codex": codex.played,
}
CHANGING = {"codex": codex.CHANGING}
"""What the agent's results have that the expert cannot know, such as times."""
RUNS = 4
"""Runs of an expert: the first ones whose calls differ."""
FEWER = {"claude_code": 2}
"""Of the others, the calls are the first ones of these two."""

pytestmark = [
    pytest.mark.agents,
    needs(None if (AGENTS / ".ready").exists() else f"no {AGENTS}: make agents"),
]


def runs(expert: Played, count: int) -> list[tuple[list[File], dict[str, str], Transcript]]:
    """Runs with different tools in a different order, among them edits of what was not read."""
    found: dict[tuple[str, ...], tuple[list[File], dict[str, str], Transcript]] = {}
    for seed in range(1000):
        rng = random.Random(seed)
        repository = new_repository(rng)
        task = new_task(rng, repository)
        played = expert(repository, task, rng)
        calls = [call for message in played.messages for call in message.get("tool_calls", ())]
        if len(calls) > 0:
            names = tuple(call["function"]["name"] for call in calls)
            found.setdefault(names, (repository, task, played))
    return sorted(found.values(), key=lambda run: -len(run[2].messages))[:count]


def with_seen(played: Transcript, changing: re.Pattern[str] | None, recorded: str) -> Transcript:
    """The transcript with what the recorded text has in the places that change."""
    if changing is None:
        return played
    seen = iter(changing.findall(recorded))
    messages = [
        {**message, "content": changing.sub(lambda _: next(seen), message["content"])}
        for message in played.messages
    ]
    return Transcript(messages, played.tools)


@pytest.mark.parametrize("agent", EXPERTS)
async def test_recorded_tokens_are_those_of_the_transcript(agent: str, tmp_path: Path) -> None:
    await assert_recorded_as_written(
        agent, EXPERTS[agent], ROOT / f"examples/{agent}/model", tmp_path
    )


async def assert_recorded_as_written(
    agent: str, expert: Played, model: Path, tmp_path: Path
) -> None:
    folder = ROOT / f"examples/{agent}"
    command = load([folder / "agentic_trainer.yaml"]).remote_agent.command
    assert command is not None
    tokenizer = AutoTokenizer.from_pretrained(model)
    renderer = create_renderer(tokenizer, Qwen3RendererConfig())
    rendering = Rendering(load_tokenizer(model), RenderingConfig())
    async with starting_proxies(model, rendering, tmp_path) as start:
        proxy = await start()
        for number, (repository, task, played) in enumerate(runs(expert, FEWER.get(agent, RUNS))):
            work = tmp_path / f"repository-{number}"
            work.mkdir()
            for file in repository:
                (work / f"{file.name}.py").write_text(file.text)
            answers = [m for m in played.messages if m["role"] == "assistant"]
            left = iter([completion_ids(answer, renderer) for answer in answers])

            def script(_: list[int], left: Iterator[list[int]] = left) -> list[int]:
                return next(left)

            proxy.engine.script = script
            loop = RemoteAgentLoop(
                proxy.control,
                CommandLauncher(command.model_copy(update={"template": str(work)})),
                Verifier(VerifierConfig(argv=("true",))),
                tmp_path / f"trials-{number}",
                trial=TrialConfig(timeout_s=300, max_retries=0, keep_workspaces=True),
            )
            rollout = await loop.run(Task("task", task), kind=SessionKind.TRAIN)
            await loop.close()
            assert rollout.status == "done", rollout.error
            _, turns = await proxy.control.get_turns(rollout.trial_id)
            assert len(turns) == len(answers)
            assert not any(turn.fork_cause for turn in turns)
            recorded = path(turns, len(turns) - 1).tolist()
            text = tokenizer.decode(recorded)
            played = with_seen(played, CHANGING.get(agent), text)
            expected = encode(played, renderer).ids.tolist()
            assert text == tokenizer.decode(expected)
            assert recorded == expected
            (left_behind,) = (tmp_path / f"trials-{number}").glob(f"{rollout.trial_id}*/work")
            changed = is_done(left_behind, work, task)
            print(task["kind"], [len(t.sampled_ids) for t in turns], "done:", changed)
