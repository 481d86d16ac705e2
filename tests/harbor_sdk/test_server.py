"""Client and server over real HTTP; the trial is scripted (real ones: tests/e2e)."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families
from pydantic import ValidationError

from harbor_sdk import (
    AgentRunClient,
    AgentRunError,
    AgentRunRequest,
    AgentSpec,
    EnvironmentSpec,
    RunStatus,
)
from harbor_sdk.server.config import ServerConfig
from harbor_sdk.server.guard import kept_token
from harbor_sdk.server.serve import locked
from tests.harbor_sdk.harbor_tasks import write_task
from tests.harbor_sdk.scripted_server import BEARER, TOKEN, ScriptedTrials, serving


@pytest.fixture
async def trials() -> ScriptedTrials:
    return ScriptedTrials()


@pytest.fixture
async def url(tmp_path: Path, trials: ScriptedTrials) -> AsyncIterator[str]:
    async with serving(tmp_path, trials, task_roots=[tmp_path / "tasks"]) as url:
        yield url


@pytest.fixture
async def client(url: str) -> AsyncIterator[AgentRunClient]:
    async with AgentRunClient(url) as client:
        yield client


def wanted(agent: str = "oracle", **fields: object) -> AgentRunRequest:
    return AgentRunRequest.model_validate(
        {"agent": {"name": agent}, "task_name": "org/task", **fields}
    )


async def test_task_is_an_upload_a_known_path_or_a_registry_name(
    client: AgentRunClient, tmp_path: Path
) -> None:
    task = write_task(tmp_path / "tasks", "one")
    uploaded = await client.submit(AgentRunRequest(agent=AgentSpec(name="oracle")), task=task)
    known = await client.submit(AgentRunRequest(task_path=str(task)))
    named = await client.submit(AgentRunRequest(task_name="org/named"))
    ended = [await client.wait(run.run_id, timeout_s=5) for run in (uploaded, known, named)]
    assert [run.metadata for run in ended] == [
        {"task": name} for name in ("one", "one", "org/named")
    ]
    assert [run.rewards for run in ended] == [{"reward": 1.0}] * 3
    assert [run.status for run in ended] == [RunStatus.COMPLETED] * 3


@pytest.mark.parametrize(
    ("request_", "match"),
    [
        (AgentRunRequest(task_path="/etc"), "not below a --tasks folder"),
        (AgentRunRequest(), "no task"),
    ],
)
async def test_unavailable_task_is_refused(
    client: AgentRunClient, request_: AgentRunRequest, match: str
) -> None:
    with pytest.raises(AgentRunError, match=match) as caught:
        await client.submit(request_)
    assert caught.value.code == "invalid"


async def test_unknown_field_is_named(url: str) -> None:
    async with aiohttp.ClientSession() as session:
        form = aiohttp.FormData()
        form.add_field("metadata", '{"agent": {"nmae": "x"}}', content_type="application/json")
        async with session.post(f"{url}api/v1/runs", data=form, headers=BEARER) as response:
            body = await response.json()
    assert response.status == 400
    assert "agent.nmae" in body["error"]["message"]


async def test_same_idempotency_key_never_starts_a_second_run(
    client: AgentRunClient, trials: ScriptedTrials
) -> None:
    runs = await asyncio.gather(
        *(client.submit(wanted(), idempotency_key="trial-7") for _ in range(8))
    )
    await client.wait(runs[0].run_id, timeout_s=5)
    again = await client.submit(wanted(), idempotency_key="trial-7")
    assert {run.run_id for run in runs} == {again.run_id}
    assert trials.started == [again.run_id]
    with pytest.raises(AgentRunError) as caught:
        await client.submit(wanted("other"), idempotency_key="trial-7")
    assert caught.value.code == "conflict"


async def test_metrics_count_runs_by_status_and_need_the_token(
    client: AgentRunClient, url: str
) -> None:
    for _ in range(2):
        run = await client.submit(wanted())
        await client.wait(run.run_id, timeout_s=5)
    async with aiohttp.ClientSession() as session:
        async with session.get(f"{url}metrics") as response:
            assert response.status == 401
        async with session.get(f"{url}metrics", headers=BEARER) as response:
            text = await response.text()
    (family,) = text_string_to_metric_families(text)
    counts = {sample.labels["status"]: sample.value for sample in family.samples}
    assert counts == {status.value: 0.0 for status in RunStatus} | {"completed": 2.0}


async def test_empty_idempotency_key_is_none(url: str) -> None:
    metadata = wanted(task_name="org/name").model_dump_json()
    found = set()
    async with aiohttp.ClientSession(headers=BEARER | {"Idempotency-Key": ""}) as session:
        for _ in range(2):
            with aiohttp.MultipartWriter("form-data") as form:
                form.append(metadata).set_content_disposition("form-data", name="metadata")
            async with session.post(f"{url}api/v1/runs?wait_s=0", data=form) as response:
                assert response.status in (200, 202)
                found.add((await response.json())["run_id"])
    assert len(found) == 2


async def test_older_client_gets_result_in_the_answer(url: str) -> None:
    metadata = (
        '{"job_id": "j", "task_id": "t", "task_path": "/data/one", "agent": {"name": "oracle", '
        '"kwargs": {}}, "timeout_multiplier": 1.0, "max_retries": 0, "verifier": {"disable": '
        'false}, "llm_proxy_url": "http://127.0.0.1:1/t/v1"}'
    )
    archive = await asyncio.to_thread(_packed_one)
    async with aiohttp.ClientSession() as session:
        form = aiohttp.FormData()
        form.add_field("metadata", metadata)
        form.add_field("task_archive", archive, filename="task.tar.gz")
        async with session.post(f"{url}api/v1/runs", data=form, headers=BEARER) as response:
            body = await response.json()
    assert response.status == 200
    assert body["status"] == "completed"
    assert body["rewards"] == {"reward": 1.0}
    assert {"run_id", "rollout_details", "error", "result_uri", "retry_count"} <= body.keys()


def _packed_one() -> bytes:
    import tempfile

    from harbor_sdk.archive import pack_task

    with tempfile.TemporaryDirectory() as folder:
        return pack_task(write_task(Path(folder), "one"))


async def test_cancelling_ends_running_and_queued_runs(
    tmp_path: Path, trials: ScriptedTrials
) -> None:
    async with (
        serving(tmp_path, trials, concurrency=1) as url,
        AgentRunClient(url) as client,
    ):
        running = await client.submit(wanted("waits"))
        queued = await client.submit(wanted("waits"))
        async for event in client.events(running.run_id):
            if event.run.phase == "agent-start":
                break
        assert (await client.cancel(queued.run_id)).status is RunStatus.CANCELLED
        assert (await client.cancel(running.run_id)).status is RunStatus.CANCELLED
        assert (await client.cancel(running.run_id)).status is RunStatus.CANCELLED
    assert trials.started == trials.ended_by_cancel == [running.run_id]


async def test_events_report_every_change_and_end(
    client: AgentRunClient, trials: ScriptedTrials
) -> None:
    run = await client.submit(wanted("waits"))
    seen = []
    async for event in client.events(run.run_id):
        seen.append((event.kind, event.run.status.value, event.run.phase))
        trials.gate.set()
    assert seen == [
        ("status", "running", ""),
        ("phase", "running", "agent-start"),
        ("status", "completed", "agent-start"),
    ]


async def test_concurrent_runs_are_limited_per_environment(
    tmp_path: Path, trials: ScriptedTrials
) -> None:
    async with (
        serving(tmp_path, trials, environment_concurrency={"docker": 2}) as url,
        AgentRunClient(url) as client,
    ):
        request = AgentRunRequest(
            agent=AgentSpec(name="waits"),
            task_name="org/task",
            environment=EnvironmentSpec(type="docker"),
        )
        runs = await asyncio.gather(*(client.submit(request) for _ in range(6)))
        other = await client.submit(wanted())  # another environment is not held up
        await client.wait(other.run_id, timeout_s=5)
        trials.most_at_once = 0
        trials.gate.set()
        for run in runs:
            await client.wait(run.run_id, timeout_s=5)
    assert trials.most_at_once <= 2
    assert len(trials.started) == 7


async def test_full_queue_is_refused_with_retry_after(
    tmp_path: Path, trials: ScriptedTrials
) -> None:
    async with (
        serving(tmp_path, trials, concurrency=1, max_queued=1) as url,
        AgentRunClient(url) as client,
        aiohttp.ClientSession() as session,
    ):
        first = await client.submit(wanted("waits"))
        async for _ in client.events(first.run_id):
            break
        await client.submit(wanted("waits"))
        form = aiohttp.FormData()
        form.add_field("metadata", wanted().model_dump_json())
        form.add_field("unused", b"makes it multipart", filename="x")
        async with session.post(
            f"{url}api/v1/runs?wait_s=0", data=form, headers=BEARER
        ) as response:
            assert response.status == 429
            assert int(response.headers["Retry-After"]) >= 1
            assert (await response.json())["error"]["code"] == "queue_full"
        trials.gate.set()


async def test_concurrent_submissions_do_not_exceed_the_queue_and_leave_no_task(
    tmp_path: Path, trials: ScriptedTrials
) -> None:
    archive = await asyncio.to_thread(_packed_one)
    async with (
        serving(tmp_path, trials, concurrency=1, max_queued=1) as url,
        AgentRunClient(url) as client,
        aiohttp.ClientSession(headers=BEARER) as session,
    ):
        first = await client.submit(wanted("waits"))
        async for _ in client.events(first.run_id):
            break

        async def post() -> int:
            form = aiohttp.FormData()
            form.add_field("metadata", wanted("waits", task_name=None).model_dump_json())
            form.add_field("task_archive", archive, filename="task.tar.gz")
            async with session.post(f"{url}api/v1/runs?wait_s=0", data=form) as response:
                return response.status

        statuses = await asyncio.gather(*(post() for _ in range(6)))
        assert sorted(statuses) == [202] + [429] * 5
        assert len(list((tmp_path / "state/tasks").iterdir())) == 1
        trials.gate.set()


async def test_restart_runs_queued_runs_once_and_reports_running_ones_as_lost(
    tmp_path: Path, trials: ScriptedTrials
) -> None:
    async with serving(tmp_path, trials, concurrency=1) as url, AgentRunClient(url) as client:
        done = await client.wait((await client.submit(wanted())).run_id, timeout_s=5)
        running = await client.submit(wanted("waits"))
        async for _ in client.events(running.run_id):
            break
        queued = await client.submit(wanted(), idempotency_key="k")
    second = ScriptedTrials()
    async with serving(tmp_path, second, concurrency=1) as url, AgentRunClient(url) as client:
        assert (await client.get(done.run_id)).rewards == {"reward": 1.0}
        lost = await client.wait(running.run_id, timeout_s=5)
        assert lost.status is RunStatus.LOST
        assert lost.rewards is None
        assert "server ended" in (lost.error or "")
        again = await client.submit(wanted(), idempotency_key="k")
        assert again.run_id == queued.run_id
        assert (await client.wait(queued.run_id, timeout_s=5)).status is RunStatus.COMPLETED
        listed = await client.list()
        assert listed.total == 3
    assert second.started == [queued.run_id]


async def test_failure_before_the_agent_is_failed_without_reward(
    client: AgentRunClient,
) -> None:
    run = await client.wait((await client.submit(wanted("breaks"))).run_id, timeout_s=5)
    assert run.status is RunStatus.FAILED
    assert run.rewards is None
    assert run.error == "RuntimeError: no such image"


@pytest.mark.parametrize(
    "outcome",
    [
        {"rewards": {"reward": float("nan")}},
        {"metadata": {"said": "\udcff"}},
        {"metadata": {"object": object()}},
        {"status": "failed", "error": "no file '\udcff'"},
    ],
    ids=["reward", "text", "object", "error"],
)
async def test_outcome_that_json_cannot_hold_fails_its_run_and_no_other(
    tmp_path: Path, outcome: dict[str, object]
) -> None:
    trials = ScriptedTrials(**outcome)
    async with serving(tmp_path, trials) as url, AgentRunClient(url) as client:
        run = await client.wait((await client.submit(wanted())).run_id, timeout_s=2)
        assert run.status is RunStatus.FAILED
        assert run.error
        trials.outcome = {"status": "completed", "rewards": {"reward": 1.0}}
        next_ = await client.wait((await client.submit(wanted())).run_id, timeout_s=2)
        assert next_.status is RunStatus.COMPLETED
        assert (await client.list()).total == 2


async def test_logs_and_artifacts_are_readable_and_nothing_outside_the_trial(
    client: AgentRunClient, url: str, tmp_path: Path
) -> None:
    run = await client.wait((await client.submit(wanted())).run_id, timeout_s=5)
    assert await client.logs(run.run_id) == "the log"
    assert await client.logs(run.run_id, tail_bytes=3) == "log"
    assert set(await client.artifacts(run.run_id)) == {"trial.log", "agent/out.txt"}
    assert await client.artifact(run.run_id, "agent/out.txt") == b"the agent's output"
    agent = tmp_path / "state/trials" / run.run_id / "agent"
    names = ("report#2", "report?v=2", "a%20b.txt", "100%.txt", "ü b")
    for name in names:
        (agent / name).write_text(name, "utf-8")
        assert await client.artifact(run.run_id, f"agent/{name}") == name.encode()
    assert {f"agent/{name}" for name in names} <= set(await client.artifacts(run.run_id))
    for path in ("agent/passwd", "../../runs.sqlite", "..%2f..%2fruns.sqlite"):
        with pytest.raises(AgentRunError) as caught:
            await client.artifact(run.run_id, path)
        assert caught.value.code == "not_found"


async def test_old_runs_and_their_folders_are_removed(
    tmp_path: Path, trials: ScriptedTrials
) -> None:
    async with serving(tmp_path, trials) as url, AgentRunClient(url) as client:
        run = await client.wait((await client.submit(wanted())).run_id, timeout_s=5)
    folder = tmp_path / "state/trials" / run.run_id
    assert folder.exists()
    async with (
        serving(tmp_path, trials, keep_s=0.001) as url,
        AgentRunClient(url) as client,
    ):
        with pytest.raises(AgentRunError) as caught:
            await _until_gone(client, run.run_id)
        assert caught.value.code == "not_found"


async def test_folders_of_old_runs_are_removed_by_the_next_server_if_this_one_is_killed(
    tmp_path: Path, trials: ScriptedTrials, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tmp_path, trials) as url, AgentRunClient(url) as client:
        run = await client.wait((await client.submit(wanted())).run_id, timeout_s=5)
    begun = threading.Event()

    def killed(path: Path, *, ignore_errors: bool) -> None:
        begun.set()
        raise KilledError

    with monkeypatch.context() as patched:
        patched.setattr("harbor_sdk.server.runs.shutil.rmtree", killed)
        async with serving(tmp_path, trials, keep_s=0.001):
            assert await asyncio.to_thread(begun.wait, 5)
    async with serving(tmp_path, trials, keep_s=0.001) as url, AgentRunClient(url) as client:
        with pytest.raises(AgentRunError):
            await _until_gone(client, run.run_id)
        assert not (tmp_path / "state/trials" / run.run_id).exists()


class KilledError(Exception):
    """The server ends here."""


async def _until_gone(client: AgentRunClient, run_id: str) -> None:
    async with asyncio.timeout(5):
        while True:
            await client.get(run_id)


@pytest.mark.parametrize("wrong", [None, TOKEN[:-1], TOKEN + "x"])
async def test_every_route_needs_a_token(
    client: AgentRunClient, url: str, wrong: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = await client.wait((await client.submit(wanted())).run_id, timeout_s=5)
    monkeypatch.delenv("HARBOR_SERVER_TOKEN")
    async with AgentRunClient(url, token=wrong) as stranger:
        for call in (
            stranger.get(run.run_id),
            stranger.submit(wanted()),
            stranger.cancel(run.run_id),
            stranger.list(),
            stranger.logs(run.run_id),
            stranger.artifacts(run.run_id),
        ):
            with pytest.raises(AgentRunError) as caught:
                await call
            assert caught.value.code == "unauthorized"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        (BEARER, 200),
        ({}, 401),
        ({"Authorization": TOKEN}, 401),
        ({"Authorization": "Bearer \xff"}, 401),
        (BEARER | {"Origin": "https://evil.test"}, 403),
        (BEARER | {"Origin": "null"}, 403),
        (BEARER | {"Sec-Fetch-Site": "cross-site"}, 403),
        (BEARER | {"Sec-Fetch-Site": "same-site"}, 403),
        (BEARER | {"Host": "evil.test"}, 403),
        (BEARER | {"Host": "127.0.0.1.evil.test:80"}, 403),
        (BEARER | {"Host": "localhost:8090"}, 200),
        (BEARER | {"Host": "[::1]:8090"}, 200),
    ],
)
async def test_web_pages_and_requests_without_the_token_are_refused(
    url: str, headers: dict[str, str], status: int
) -> None:
    host, port = urlsplit(url).hostname, urlsplit(url).port
    sent = {"Host": f"{host}:{port}", **headers}
    head = "".join(f"{name}: {value}\r\n" for name, value in sent.items())
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(f"GET /api/v1/runs HTTP/1.1\r\n{head}Connection: close\r\n\r\n".encode("latin-1"))
    line = await reader.readline()
    writer.close()
    assert int(line.split()[1]) == status


@pytest.mark.parametrize(
    ("path", "header", "status"),
    [
        ("/api/v1/runs", "Expect: \xff", 417),
        ("/nothing", "Expect: \xff", 417),
        ("/nothing", "X-Any: 1", 404),
        ("/api/v1/runs", "Idempotency-Key: \xff", 400),
        ("/api/v1/runs/%ff", "X-Any: 1", 404),
        ("/api/v1/runs/RUN/events", "Last-Event-ID: 99999999999999999999", 200),
        ("/api/v1/runs/RUN/events", "Last-Event-ID: \xc2\xb2", 200),
        ("/api/v1/runs/RUN/artifacts/%00", "X-Any: 1", 404),
        ("/api/v1/runs/RUN/artifacts/" + "x" * 300, "X-Any: 1", 404),
    ],
)
async def test_malformed_request_is_answered_without_a_traceback(
    client: AgentRunClient,
    url: str,
    path: str,
    header: str,
    status: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    run = await client.wait((await client.submit(wanted())).run_id, timeout_s=5)
    split = urlsplit(url)
    reader, writer = await asyncio.open_connection(split.hostname, split.port)
    lines = [
        f"GET {path.replace('RUN', run.run_id)} HTTP/1.1",
        f"Host: {split.hostname}:{split.port}",
        f"Authorization: Bearer {TOKEN}",
        "Connection: close",
        header,
    ]
    writer.write("\r\n".join([*lines, "", ""]).encode("latin-1"))
    answer = await reader.read()
    writer.close()
    assert int(answer.split()[1]) == status
    assert not [record for record in caplog.records if record.exc_info]


@pytest.mark.parametrize("host", ["", ":", "[", "a b", "[::1", "127.0.0.1:x"])
async def test_malformed_host_is_refused(url: str, host: str) -> None:
    split = urlsplit(url)
    reader, writer = await asyncio.open_connection(split.hostname, split.port)
    writer.write(f"GET /health HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
    line = await reader.readline()
    writer.close()
    assert int(line.split()[1]) in (400, 403)


def test_server_needs_a_token_and_can_make_one(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="token"):
        ServerConfig.model_validate({})
    with pytest.raises(ValidationError, match="16 characters"):
        ServerConfig(token="short")
    made = kept_token(tmp_path / "state")
    assert len(made) >= 32
    assert kept_token(tmp_path / "state") == made
    assert (tmp_path / "state/token").stat().st_mode & 0o777 == 0o600


async def test_wait_ends_at_its_timeout_and_run_continues(
    client: AgentRunClient, trials: ScriptedTrials
) -> None:
    run = await client.submit(wanted("waits"))
    with pytest.raises(AgentRunError) as caught:
        await client.wait(run.run_id, timeout_s=0.2)
    assert caught.value.code == "timeout"
    trials.gate.set()
    assert (await client.wait(run.run_id, timeout_s=5)).status is RunStatus.COMPLETED


async def test_unreachable_server_is_named(unused_tcp_port: int) -> None:
    async with AgentRunClient(f"http://127.0.0.1:{unused_tcp_port}") as client:
        with pytest.raises(AgentRunError, match=f"{unused_tcp_port} cannot be reached") as caught:
            await client._json("GET", "/health")
    assert caught.value.code == "unreachable"


async def test_files_of_submissions_that_a_killed_server_did_not_accept_are_removed(
    tmp_path: Path, trials: ScriptedTrials
) -> None:
    async with serving(tmp_path, trials) as url, AgentRunClient(url) as client:
        task = write_task(tmp_path, "one")
        run = await client.submit(AgentRunRequest(agent=AgentSpec(name="oracle")), task=task)
        await client.wait(run.run_id, timeout_s=5)
    state = tmp_path / "state"
    (state / "uploads/run-half").write_bytes(b"half an archive")
    (state / "tasks/run-unknown").mkdir()
    async with serving(tmp_path, trials):
        assert list((state / "uploads").iterdir()) == []
        assert [path.name for path in (state / "tasks").iterdir()] == [run.run_id]


async def test_concurrent_equal_submissions_leave_one_task(
    client: AgentRunClient, tmp_path: Path, trials: ScriptedTrials
) -> None:
    task = write_task(tmp_path / "in", "one")
    request = AgentRunRequest(agent=AgentSpec(name="oracle"))
    runs = await asyncio.gather(
        *(client.submit(request, task=task, idempotency_key="same") for _ in range(4))
    )
    assert len({run.run_id for run in runs}) == len(trials.started) == 1
    assert [path.name for path in (tmp_path / "state/tasks").iterdir()] == [runs[0].run_id]


async def test_same_key_with_another_archive_is_refused(
    client: AgentRunClient, tmp_path: Path
) -> None:
    request = AgentRunRequest(agent=AgentSpec(name="oracle"))
    one, two = (write_task(tmp_path / "in", name) for name in ("one", "two"))
    run = await client.submit(request, task=one, idempotency_key="k")
    with pytest.raises(AgentRunError) as caught:
        await client.submit(request, task=two, idempotency_key="k")
    assert caught.value.code == "conflict"
    assert run.run_id in caught.value.message


async def test_archive_above_the_bound_is_refused_and_removed(
    tmp_path: Path, trials: ScriptedTrials
) -> None:
    async with (
        serving(tmp_path, trials, max_archive_mb=1) as url,
        AgentRunClient(url) as client,
    ):
        with pytest.raises(AgentRunError) as caught:
            await client.submit(wanted(task_name=None), task=bytes(3 * 2**20))
    assert caught.value.code == "too_large"
    assert trials.started == []
    assert not list((tmp_path / "state/uploads").iterdir())
    assert not list((tmp_path / "state/tasks").iterdir())


def test_second_server_on_a_state_folder_is_refused(tmp_path: Path) -> None:
    first = locked(tmp_path)
    assert first is not None
    assert locked(tmp_path) is None
    first.close()
    second = locked(tmp_path)
    assert second is not None
    second.close()
