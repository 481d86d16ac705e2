"""Stock agents as real Harbor trials, through our launcher and our proxy."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from agent_loop.extras.harbor.launcher import RUN_FILE, HarborConfig, HarborLauncher
from agent_loop.records import AgentEnd, AgentResult, Task, Trial
from harbor_sdk import AgentRun
from proxy.client import SessionHandle
from proxy.records import FinishReason, TurnStatus
from proxy.token_tree.tree import TokenTree
from tests.e2e.harbor_server import HarborServer, harbor_server, needs_harbor
from tests.harbor_sdk.harbor_tasks import write_task
from tests.needs import needs
from tests.proxy.conftest import (  # noqa: F401 (fixtures)
    RunningProxy,
    StartProxy,
    checkpoint,
    proxy,
    rendering,
    start_proxy,
)

pytestmark = needs_harbor
AGENTS = Path(__file__).resolve().parents[2] / ".agents"
needs_agents = needs(None if (AGENTS / ".ready").exists() else f"no {AGENTS}: make agents")
TERMINUS = '{{"analysis": "a", "plan": "p", "commands": {commands}, "task_complete": {complete}}}'


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HarborServer]:
    # The agents' Python may lie in this user's home, which a trial does not see.
    python = (AGENTS / "python/bin/python").resolve().parents[1]
    own = {"path": [str(AGENTS / "bin")], "bind": [str(AGENTS), str(python)]}
    local = own if AGENTS.exists() else {}
    flags = ("--environment-kwargs", json.dumps(local))
    with harbor_server(tmp_path_factory.mktemp("state"), *flags) as server:
        yield server


async def launch(
    server: HarborServer, session: SessionHandle, folder: Path, **settings: object
) -> AgentResult:
    folder.mkdir()
    trial = Trial(
        trial_id=session.trial_id,
        task=Task("one", {"local_task_path": str(write_task(folder / "tasks", "one"))}),
        base_url=session.base_url,
        api_key=session.api_key,
        model="policy",
        directory=folder,
        timeout_s=60.0,
    )
    given = {"server_url": server.url, **settings}
    launcher = HarborLauncher(HarborConfig.model_validate(given))
    try:
        return await launcher.run(trial)
    finally:
        await launcher.close()


def call(name: str, **arguments: str) -> str:
    """A tool call as the model of the tests writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def in_turn(*answers: str) -> Callable[[str], str]:
    """The n-th answer to a prompt that has n answers in it already."""
    return lambda prompt: answers[prompt.count("<|im_start|>assistant") - 1]


async def test_token_ids_of_terminus_2_equal_the_recorded_ones(
    proxy: RunningProxy,  # noqa: F811
    server: HarborServer,
    tmp_path: Path,
) -> None:
    keys = '[{"keystrokes": "echo hello-one > answer.txt\\n", "duration": 0.1}]'
    answers = [
        TERMINUS.format(commands=keys, complete="false"),
        TERMINUS.format(commands="[]", complete="true"),
        TERMINUS.format(commands="[]", complete="true"),
    ]
    proxy.answers(in_turn(*answers))
    session = await proxy.session()
    directory = tmp_path / "trial"

    result = await launch(
        server,
        session,
        directory,
        agent_name="terminus-2",
        agent_kwargs={"collect_rollout_details": True, "record_terminal_session": False},
    )

    assert (result.end, result.reward) == (AgentEnd.EXITED, 1.0), result.error
    run = AgentRun.model_validate_json((directory / RUN_FILE).read_text())
    assert run.rollout_details is not None
    (details,) = run.rollout_details
    _, turns = await proxy.record(session)
    assert [turn.status for turn in turns] == [TurnStatus.DONE] * 3
    tree = TokenTree(turns)
    assert details.prompt_token_ids == [
        tree.path(turn.index)[: turn.prompt_tokens].tolist() for turn in turns
    ]
    assert details.completion_token_ids == [turn.sampled_ids.tolist() for turn in turns]
    assert details.logprobs == [turn.logprobs.tolist() for turn in turns]
    for file in directory.rglob("*"):
        assert not file.is_file() or session.api_key.encode() not in file.read_bytes()


WRITE = "echo hello-one > answer.txt"


@needs_agents
@pytest.mark.agents
@pytest.mark.parametrize(
    ("agent", "answers"),
    [
        (
            {"agent_import_path": "harbor_sdk.local_agents:LocalMiniSweAgent"},
            (
                call("bash", command=WRITE),
                call("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"),
            ),
        ),
        (
            {"agent_name": "claude-code"},
            (call("Bash", command=WRITE, description="write"), "Done."),
        ),
        ({"agent_name": "codex"}, (call("exec_command", cmd=WRITE), "Done.")),
    ],
    ids=["mini-swe-agent", "claude-code", "codex"],
)
async def test_trial_of_a_stock_agent_is_one_exact_path(
    start_proxy: StartProxy,  # noqa: F811
    server: HarborServer,
    tmp_path: Path,
    agent: dict[str, object],
    answers: tuple[str, ...],
) -> None:
    # Claude Code's first prompt is 58,000 tokens in the tests' small vocabulary.
    proxy = await start_proxy(max_context_tokens=131_072)  # noqa: F811
    proxy.answers(in_turn(*answers))
    proxy.engine.expect_extension = True
    session = await proxy.session()

    result = await launch(server, session, tmp_path / "trial", **agent)

    log = (tmp_path / "trial/agent.log").read_text()
    assert (result.end, result.reward) == (AgentEnd.EXITED, 1.0), (result.error, log)
    _, turns = await proxy.record(session)
    assert [turn.status for turn in turns] == [TurnStatus.DONE] * len(answers)
    assert [turn.fork_cause for turn in turns] == [None] * len(answers)
    assert proxy.engine.violations == []


@needs_agents
@pytest.mark.agents
async def test_answers_that_reach_the_length_limit_are_no_failure_of_the_trial(
    start_proxy: StartProxy,  # noqa: F811
    server: HarborServer,
    tmp_path: Path,
) -> None:
    """Claude Code asks again three times and ends with an error of its own."""
    proxy = await start_proxy(max_context_tokens=131_072)  # noqa: F811
    proxy.answers("Let me look at this and at that. " * 9)
    session = await proxy.session(sampling={"max_tokens": 5})

    result = await launch(server, session, tmp_path / "trial", agent_name="claude-code")

    assert (result.end, result.reward) == (AgentEnd.CRASHED, 0.0), result.error
    assert "OutputTokenExceededError" in (result.error or "")
    _, turns = await proxy.record(session)
    assert {turn.finish_reason for turn in turns} == {FinishReason.LENGTH}
