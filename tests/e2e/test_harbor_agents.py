"""Stock agents as real Harbor trials, through our launcher and our proxy."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agent_loop.launchers.harbor import RUN_FILE, HarborLauncher, HarborSettings
from agent_loop.launchers.protocol import AgentEnd, AgentResult, Trial
from agent_loop.records import Task
from harbor_sdk import AgentRun
from proxy.client import SessionHandle
from proxy.records import TurnStatus
from proxy.token_tree import TokenTree
from tests.e2e.harbor_server import HarborServer, harbor_server, needs_harbor
from tests.harbor_sdk.harbor_tasks import write_task
from tests.proxy.conftest import (  # noqa: F401 (fixtures)
    RunningProxy,
    checkpoint,
    proxy,
    rendering,
    start_proxy,
)

pytestmark = needs_harbor
TERMINUS = '{{"analysis": "a", "plan": "p", "commands": {commands}, "task_complete": {complete}}}'


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[HarborServer]:
    async with harbor_server(tmp_path / "state") as server:
        yield server


async def launch(
    server: HarborServer, session: SessionHandle, folder: Path, agent: str, **kwargs: object
) -> AgentResult:
    trial = Trial(
        trial_id=session.trial_id,
        task=Task("one", {"local_task_path": str(write_task(folder / "tasks", "one"))}),
        base_url=session.base_url,
        api_key=session.api_key,
        model="policy",
        directory=folder,
        timeout_s=60.0,
    )
    settings = HarborSettings(agent_name=agent, agent_kwargs=kwargs, harbor_server_url=server.url)
    launcher = HarborLauncher(settings)
    try:
        return await launcher.run(trial)
    finally:
        await launcher.close()


async def test_terminus_2s_own_token_ids_are_those_that_the_proxy_recorded(
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
    proxy.answers(lambda prompt: answers[prompt.count("<|im_start|>assistant") - 1])
    session = await proxy.session()
    directory = tmp_path / "trial"
    directory.mkdir()

    result = await launch(
        server,
        session,
        directory,
        "terminus-2",
        collect_rollout_details=True,
        record_terminal_session=False,
    )

    assert (result.end, result.reward) == (AgentEnd.EXITED, 1.0), result.error
    run = AgentRun.model_validate_json((directory / RUN_FILE).read_text())
    assert run.rollout_details is not None
    (told,) = run.rollout_details
    _, turns = await proxy.record(session)
    assert [turn.status for turn in turns] == [TurnStatus.DONE] * 3
    tree = TokenTree(turns)
    assert told.prompt_token_ids == [
        tree.path(turn.index)[: turn.prompt_tokens].tolist() for turn in turns
    ]
    assert told.completion_token_ids == [turn.sampled_ids.tolist() for turn in turns]
    assert told.logprobs == [turn.logprobs.tolist() for turn in turns]
    for file in directory.rglob("*"):
        assert not file.is_file() or session.api_key.encode() not in file.read_bytes()
