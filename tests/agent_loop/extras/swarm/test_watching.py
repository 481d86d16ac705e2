"""What can be watched from outside: probes, Prometheus' metrics, tasks, changes, warnings."""

from __future__ import annotations

import asyncio
import io
import logging
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from pydantic import BaseModel
from rich.console import Console

from agent_loop.extras.swarm import AsyncSwarmClient, EngineState, SwarmClient, SwarmError, cli
from agent_loop.extras.swarm.client_texts import config_text
from agent_loop.extras.swarm.terminal import picture
from agent_loop.extras.swarm.token import TOKEN_VARIABLE
from agent_loop.extras.swarm.wire import Status
from tests.agent_loop.extras.swarm.conftest import TOKEN, RunningSwarm, StartSwarm

ONE: dict[str, Any] = {"groups": 1, "group_size": 2}


async def _probe(swarm: RunningSwarm, path: str, **headers: str) -> tuple[int, Any]:
    async with swarm.http.get(swarm.url + path, headers=headers) as response:
        return response.status, await response.json()


async def test_probes_need_no_token_and_follow_the_engine(start_swarm: StartSwarm) -> None:
    swarm = await start_swarm(rolling=False)
    assert await _probe(swarm, "/health") == (200, {"state": "offline"})
    assert await _probe(swarm, "/ready") == (503, {"state": "offline"})
    await swarm.client.auto_start("a: 1")
    pod = {"Host": "10.1.2.3:8100"}  # how Kubernetes calls a probe
    assert await _probe(swarm, "/ready", **pod) == (200, {"state": "rolling"})
    assert (await _probe(swarm, "/ready", Origin="http://evil.test"))[0] == 403
    await swarm.swarm.trainer_ended(EngineState.ERROR, "exit code 1")
    assert await _probe(swarm, "/ready") == (503, {"state": "error"})
    assert await _probe(swarm, "/health") == (200, {"state": "error"})


async def test_metrics_need_the_token_and_hold_the_status(start_swarm: StartSwarm) -> None:
    swarm = await start_swarm(**ONE)
    await swarm.play("a", 1.0)
    await swarm.play("a", 0.0)
    assert await swarm.trainer.next_batch() is not None
    assert (await _probe(swarm, "/metrics"))[0] == 401

    headers = {"Authorization": f"Bearer {TOKEN}"}
    async with swarm.http.get(f"{swarm.url}/metrics", headers=headers) as response:
        text = await response.text()

    values = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert values["agentic_swarm_engine_state", "syncing"] == 1
    assert values["agentic_swarm_engine_state", "rolling"] == 0
    assert values["agentic_swarm_episodes", "batched"] == 2
    assert values["agentic_swarm_batches",] == 1
    assert values["agentic_swarm_batch_mean_reward",] == 0.5
    assert values["agentic_swarm_waiting_claims",] == 0


async def test_tasks_are_counted_by_state_with_their_mean_reward(
    start_swarm: StartSwarm,
) -> None:
    swarm = await start_swarm(**ONE)
    await swarm.play("a", 1.0)
    await swarm.play("b", 0.25)
    await swarm.play("b", 0.75, kind="eval")
    await swarm.client.abort_episode(await swarm.client.begin_episode(task_id="c", timeout_s=5))
    await swarm.play("a", 0.0)
    await swarm.trainer.next_batch()

    tasks = await swarm.client.task_counts()

    assert [(t.task_id, t.episodes, t.rewards, t.mean_reward) for t in tasks] == [
        ("a", {"batched": 2}, 2, 0.5),
        ("c", {"aborted": 1}, 0, None),
        ("b", {"ended": 1, "evaluated": 1}, 2, 0.5),
    ]
    assert [task.task_id for task in await swarm.client.task_counts(limit=1)] == ["a"]


async def test_tasks_command_prints_a_line_for_each_task(
    start_swarm: StartSwarm, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    swarm = await start_swarm(**ONE)
    await swarm.play("a", 1.0)
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    monkeypatch.setattr(cli, "hide_memory", lambda: None)  # of the test's own process
    assert await asyncio.to_thread(cli.main, ["tasks", swarm.url]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line == '{"task_id":"a","episodes":{"ended":1},"rewards":1,"mean_reward":1.0}'


async def test_warning_comes_at_80_percent_of_the_collected_episodes_and_is_logged_once(
    start_swarm: StartSwarm, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "agent_loop.extras.swarm.swarm")
    swarm = await start_swarm(groups=2, group_size=2, max_collected=5)
    for task in ("a", "b", "c"):
        await swarm.play(task, 1.0)
    assert (await swarm.client.status()).warning == ""
    await swarm.play("d", 1.0)

    status = await swarm.client.status()
    assert status.warning.startswith("4 ended episodes wait for a batch; at swarm.max_collected=5")
    await swarm.play("e", 1.0)
    await swarm.swarm._look()
    assert len([r for r in caplog.records if "swarm.max_collected" in r.getMessage()]) == 1
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(picture(status, [], now=0.0))
    assert status.warning in console.export_text()


async def test_synchronous_client_iterates_over_changes(start_swarm: StartSwarm) -> None:
    swarm = await start_swarm(**ONE)

    def states() -> list[EngineState]:
        seen: list[EngineState] = []
        with SwarmClient(swarm.url, TOKEN, poll_s=0.1) as client:
            for status in client.changes():
                if not seen or seen[-1] is not status.state:
                    seen.append(status.state)
                    first.set()
                if status.state is EngineState.SYNCING:
                    break
        return seen

    first = threading.Event()
    watching = asyncio.create_task(asyncio.to_thread(states))
    await asyncio.to_thread(first.wait, 10)
    await swarm.play("a", 1.0)
    await swarm.play("a", 0.0)
    assert await swarm.trainer.next_batch() is not None
    assert await watching == [EngineState.ROLLING, EngineState.SYNCING]


async def test_time_outs_of_a_client_are_arguments() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        impatient = AsyncSwarmClient(
            url, TOKEN, patience_s=0.0, request_timeout_s=0.1, poll_s=0.0, connect_timeout_s=5.0
        )
        async with impatient:
            with pytest.raises(SwarmError, match="cannot be reached") as caught:
                await impatient.status()
    assert isinstance(caught.value.__cause__, TimeoutError)


class Configuration(BaseModel):
    model: dict[str, Path]
    lr: float = 1e-6


@pytest.mark.parametrize(
    "config",
    [
        {"model": {"path": "/models/qwen3"}, "lr": 1e-6},
        Configuration(model={"path": Path("/models/qwen3")}),
    ],
    ids=["mapping", "model"],
)
async def test_configuration_may_be_a_mapping_or_a_model(
    start_swarm: StartSwarm, config: Any
) -> None:
    swarm = await start_swarm(rolling=False)
    await swarm.client.auto_start(config)
    headers = {"Authorization": f"Bearer {TOKEN}"}
    async with swarm.http.get(f"{swarm.url}/v1/config", headers=headers) as response:
        text = await response.text()
    assert yaml.safe_load(text) == {"model": {"path": "/models/qwen3"}, "lr": 1e-6}
    await swarm.client.stop_engine()
    await swarm.client.auto_start(config)
    assert swarm.trainer.run_dirs == ["", "runs/scripted"]  # the same text resumes


def test_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("agentic-swarm ")


def test_configuration_of_objects_is_refused() -> None:
    with pytest.raises(SwarmError, match="use only text, numbers, lists") as caught:
        config_text({"model": {"path": object()}})
    assert caught.value.code == "invalid"


def test_status_of_an_older_server_has_no_warning() -> None:
    assert Status.model_validate({"state": "rolling"}).warning == ""
