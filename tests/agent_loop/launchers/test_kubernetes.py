"""The kubernetes launcher against a fake API server (`fake_kubernetes.py`)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
from pydantic import ValidationError

from agent_loop.errors import LaunchError
from agent_loop.extras.kubernetes import client as kubernetes_client
from agent_loop.extras.kubernetes import launcher as kubernetes
from agent_loop.extras.kubernetes.launcher import KubernetesConfig, KubernetesLauncher
from agent_loop.processes.host import PROCESS, ProcessConfig
from agent_loop.records import AgentEnd, AgentResult, Trial
from tests.agent_loop.conftest import MakeTrial
from tests.agent_loop.launchers.fake_kubernetes import (
    NAMESPACE,
    FakeKubernetes,
    ended,
    evicted,
    fake_kubernetes,
    running,
    waiting,
)
from tests.needs import needs

pytestmark = needs(
    None
    if find_spec("kubernetes_asyncio")
    else "kubernetes_asyncio is not installed: pip install -e '.[kubernetes]'"
)


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[FakeKubernetes]:
    async with fake_kubernetes(tmp_path) as cluster:
        yield cluster


@pytest.fixture
def trial(make_trial: MakeTrial) -> Trial:
    return make_trial(answer="hidden")


def launcher_of(
    cluster: FakeKubernetes, process: ProcessConfig = PROCESS, **settings: Any
) -> KubernetesLauncher:
    given = {"image": "agent:1", "kubeconfig": cluster.kubeconfig, "patience_s": 1, **settings}
    return KubernetesConfig.model_validate(given).build(process)


async def run(
    cluster: FakeKubernetes, trial: Trial, *statuses: dict[str, Any], **settings: Any
) -> AgentResult:
    """Runs the trial, whose pod gets these statuses one after the other."""
    launcher = launcher_of(cluster, **settings)
    trial_ends = asyncio.create_task(launcher.run(trial))
    try:
        job = await cluster.job(0)
        for status in statuses:
            cluster.set_status(job, status)
        return await trial_ends
    finally:
        await launcher.close()


def environment(job: dict[str, Any]) -> dict[str, Any]:
    (container,) = job["spec"]["template"]["spec"]["containers"]
    return {each["name"]: each.get("value", each.get("valueFrom")) for each in container["env"]}


async def test_long_output_is_kept_in_part(cluster: FakeKubernetes, trial: Trial) -> None:
    cluster.logs = b"first\n" + b"x" * 10_000 + b"\nlast\n"
    await run(cluster, trial, ended(), process=ProcessConfig(log_bytes=1024))
    kept = (trial.directory / "agent.log").read_bytes()
    assert kept.startswith(b"first\n")
    assert kept.endswith(b"\nlast\n")
    assert len(kept) < 2048


async def test_agent_that_ends_by_itself(cluster: FakeKubernetes, trial: Trial) -> None:
    message = '{"reward": 0.5, "style": 1.0}'
    result = await run(cluster, trial, running(), ended(message=message))
    assert (result.end, result.error, result.wall_s) == (AgentEnd.EXITED, None, 7.0)
    assert (result.reward, result.reward_parts) == (0.5, {"reward": 0.5, "style": 1.0})
    assert (trial.directory / "agent.log").read_bytes() == cluster.logs
    assert cluster.deleted == []  # Kubernetes deletes it after TTL_S


async def test_job_and_secret_are_valid_and_the_key_is_in_the_secret_only(
    cluster: FakeKubernetes, trial: Trial
) -> None:
    trial = replace(trial, hidden_fields=frozenset({"answer"}))
    settings = {
        "argv": ["agent", "--task", "{task_file}", "echo $(X) $$", "key={api_key}"],
        "env": {"WHAT": "{prompt}", "ANTHROPIC_API_KEY": "{api_key}"},
        "resources": {"requests": {"cpu": "1"}, "limits": {"memory": "2Gi"}},
        "labels": {"app": "agent"},
        "pod": {
            "imagePullSecrets": [{"name": "registry"}],
            "nodeSelector": {"pool": "agents"},
            "tolerations": [{"key": "spot"}],
        },
    }
    await run(cluster, trial, ended(), process=ProcessConfig(grace_s=1.5), **settings)
    (job,) = cluster.created
    (secret,) = cluster.secrets.values()
    for made in (job, secret):
        kubernetes_validate.validate(made, "1.33", strict=True)
    spec = job["spec"]["template"]["spec"]
    assert spec["terminationGracePeriodSeconds"] == 2
    (container,) = spec["containers"]
    assert container["command"][2:] == [
        "/agentic-trial/task.json",
        "echo $$(X) $$$$",
        "key=$(AGENTIC_SESSION_KEY)",
    ]
    assert container["env"][0]["name"] == "AGENTIC_SESSION_KEY"  # before those that refer to it
    assert environment(job)["ANTHROPIC_API_KEY"] == "$(AGENTIC_SESSION_KEY)"
    assert environment(job)["WHAT"] == "do it"
    assert environment(job)["OPENAI_BASE_URL"] == trial.base_url
    assert environment(job)["OPENAI_API_KEY"]["secretKeyRef"]["name"] == job["metadata"]["name"]
    assert trial.api_key not in str(job)
    assert secret["stringData"]["api-key"] == trial.api_key
    assert secret["stringData"]["task.json"] == '{"prompt":"do it"}'
    assert secret["metadata"]["ownerReferences"][0]["uid"] == job["metadata"]["uid"]
    assert spec["automountServiceAccountToken"] is False
    assert (spec["nodeSelector"], spec["imagePullSecrets"]) == (
        {"pool": "agents"},
        [{"name": "registry"}],
    )
    assert next(each["key"] for each in spec["tolerations"]) == "spot"
    assert (job["spec"]["backoffLimit"], spec["restartPolicy"]) == (0, "Never")
    assert job["spec"]["activeDeadlineSeconds"] > trial.timeout_s


async def test_agent_that_fails_has_crashed(cluster: FakeKubernetes, trial: Trial) -> None:
    result = await run(cluster, trial, running(), ended(137, "OOMKilled", "Killed"))
    assert (result.end, result.error) == (AgentEnd.CRASHED, "exit code 137 (OOMKilled)")
    assert result.reward is None


async def test_image_that_can_be_pulled_at_a_later_attempt_runs(
    cluster: FakeKubernetes, trial: Trial
) -> None:
    busy = waiting("ImagePullBackOff", "429 Too Many Requests")
    assert (await run(cluster, trial, busy, running(), ended())).end is AgentEnd.EXITED


async def test_image_that_cannot_be_pulled_fails_the_trial_with_a_remedy(
    cluster: FakeKubernetes, trial: Trial, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubernetes, "PULL_S", 0.2)
    pulling = waiting("ContainerCreating", "")
    failed = waiting("ImagePullBackOff", 'Back-off pulling image "agent:1"')
    with pytest.raises(LaunchError, match=r"Back-off pulling.*remote_agent\.kubernetes\.image"):
        await run(cluster, trial, pulling, failed)
    assert cluster.jobs == {}


@pytest.mark.parametrize(
    ("status", "why"),
    [
        (evicted("PreemptionByScheduler"), "PreemptionByScheduler"),
        ({**ended(137, "Error"), "reason": "Evicted", "message": "low on memory"}, "Evicted: low"),
        ({"phase": "Failed", "reason": "NodeAffinity"}, "NodeAffinity"),
    ],
)
async def test_evicted_pod_is_lost_although_its_container_ended_with_a_code(
    cluster: FakeKubernetes, trial: Trial, status: dict[str, Any], why: str
) -> None:
    with pytest.raises(LaunchError, match=f"was lost: {why}"):
        await run(cluster, trial, running(), status)
    assert cluster.jobs == {}


@pytest.mark.parametrize(
    ("condition", "end"), [("", None), ("FailureTarget", AgentEnd.TIMED_OUT)], ids=str
)
async def test_container_that_ends_because_its_pod_is_deleted_has_not_crashed(
    cluster: FakeKubernetes, trial: Trial, condition: str, end: AgentEnd | None
) -> None:
    launcher = launcher_of(cluster)
    trial_ends = asyncio.create_task(launcher.run(trial))
    job = await cluster.job(0)
    failed = {"type": condition, "status": "True", "reason": "DeadlineExceeded"}
    cluster.jobs[job]["status"] = {"conditions": [failed]}
    cluster.pods[job]["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:07Z"
    cluster.set_status(job, ended(143, "Error"))
    if end is None:
        with pytest.raises(LaunchError, match="was lost: it was deleted"):
            await trial_ends
    else:
        assert (await trial_ends).end is end
    await launcher.close()


async def test_pod_whose_sidecar_does_not_end_is_deleted(
    cluster: FakeKubernetes, trial: Trial
) -> None:
    status = ended(2, "Error")
    sidecar = {"name": "proxy", "state": {"running": {}}}
    status = {"phase": "Running", "containerStatuses": [sidecar, *status["containerStatuses"]]}
    assert (await run(cluster, trial, running(), status)).error == "exit code 2 (Error)"
    assert cluster.jobs == {}


async def test_pod_that_is_deleted_with_its_node_is_lost(
    cluster: FakeKubernetes, trial: Trial
) -> None:
    launcher = launcher_of(cluster)
    trial_ends = asyncio.create_task(launcher.run(trial))
    job = await cluster.job(0)
    cluster.set_status(job, running())
    cluster.delete_pod(job)
    with pytest.raises(LaunchError, match="was lost: it was deleted"):
        await trial_ends
    assert cluster.deleted == [job]
    await launcher.close()


async def test_straggler_is_ended_at_the_deadline_and_its_log_is_kept(
    cluster: FakeKubernetes, trial: Trial
) -> None:
    result = await run(cluster, replace(trial, timeout_s=0.2), running())
    assert result.end is AgentEnd.TIMED_OUT
    assert (cluster.jobs, cluster.pods) == ({}, {})
    assert (trial.directory / "agent.log").read_bytes() == cluster.logs


async def test_jobs_own_deadline_is_a_timeout(cluster: FakeKubernetes, trial: Trial) -> None:
    launcher = launcher_of(cluster)
    trial_ends = asyncio.create_task(launcher.run(trial))
    job = await cluster.job(0)
    cluster.set_status(job, running())
    failed = {"type": "Failed", "status": "True", "reason": "DeadlineExceeded"}
    cluster.jobs[job]["status"] = {"conditions": [failed]}
    cluster.delete_pod(job)
    assert (await trial_ends).end is AgentEnd.TIMED_OUT
    await launcher.close()


async def test_no_job_is_created_before_its_pod_is_sure_to_be_seen(
    cluster: FakeKubernetes, trial: Trial
) -> None:
    """A pod that was created and deleted before the first list would be in no event after it."""
    cluster.listing = asyncio.Event()
    launcher = launcher_of(cluster)
    asked = asyncio.create_task(cluster.listed_again())
    trial_ends = asyncio.create_task(launcher.run(trial))
    await asked
    other = await kubernetes_client.Kubernetes.open(cluster.kubeconfig, NAMESPACE, 1)
    for _ in range(5):  # in which time a request for a Job would have come
        with pytest.raises(kubernetes_client.KubernetesError):
            await other.get("batch/v1", "jobs", "another")
    assert cluster.created == []
    cluster.listing.set()
    job = await cluster.job(0)
    cluster.delete_pod(job)
    with pytest.raises(LaunchError, match="was lost"):
        await trial_ends
    await other.close()
    await launcher.close()


async def test_cancelled_trial_deletes_its_job_before_it_raises(
    cluster: FakeKubernetes, trial: Trial
) -> None:
    launcher = launcher_of(cluster)
    trial_ends = asyncio.create_task(launcher.run(trial))
    job = await cluster.job(0)
    trial_ends.cancel()
    with pytest.raises(asyncio.CancelledError):
        await trial_ends
    assert (cluster.deleted, cluster.pods) == ([job], {})
    await launcher.close()


async def test_further_trials_wait_for_one_of_the_jobs(
    cluster: FakeKubernetes, trial: Trial
) -> None:
    launcher = launcher_of(cluster, agents=1)
    trials = [replace(trial, trial_id=f"t-{number}") for number in range(3)]
    ends = [asyncio.create_task(launcher.run(each)) for each in trials]
    for number in range(3):
        job = await cluster.job(number)
        assert len(cluster.created) == number + 1
        cluster.set_status(job, ended())
    assert [(await end).end for end in ends] == [AgentEnd.EXITED] * 3
    await launcher.close()


async def test_trial_that_gets_no_job_in_time_fails(cluster: FakeKubernetes, trial: Trial) -> None:
    launcher = launcher_of(cluster, agents=1, room_timeout_s=0.1)
    async with launcher.place():
        with pytest.raises(LaunchError, match=r"none of 1 Jobs.*remote_agent\.kubernetes\.agents"):
            await launcher.run(trial)
    assert cluster.created == []
    await launcher.close()


@pytest.mark.parametrize("gone_as_status", [True, False])
@pytest.mark.parametrize("forget", [True, False])
async def test_end_during_a_gap_of_the_watch_is_seen(
    cluster: FakeKubernetes,
    trial: Trial,
    monkeypatch: pytest.MonkeyPatch,
    forget: bool,
    gone_as_status: bool,
) -> None:
    monkeypatch.setattr(kubernetes_client, "RETRY_S", 0.01)
    cluster.gone_as_status = gone_as_status
    launcher = launcher_of(cluster)
    trial_ends = asyncio.create_task(launcher.run(trial))
    job = await cluster.job(0)
    cluster.set_status(job, running())
    cluster.end_watches(forget=forget)
    cluster.set_status(job, ended(3, "Error"))
    assert (await trial_ends).error == "exit code 3 (Error)"
    assert cluster.lists == (2 if forget else 1)
    await launcher.close()


async def test_pod_that_is_missing_in_a_new_list_is_lost(
    cluster: FakeKubernetes, trial: Trial, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubernetes_client, "RETRY_S", 0.01)
    launcher = launcher_of(cluster)
    trial_ends = asyncio.create_task(launcher.run(trial))
    job = await cluster.job(0)
    cluster.set_status(job, running())
    cluster.end_watches(forget=True)
    await cluster.listed_again()
    cluster.end_watches(forget=True)
    cluster.pods.clear()
    with pytest.raises(LaunchError, match="was lost: it was deleted"):
        await trial_ends
    await launcher.close()


def fail_next_watch(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    from kubernetes_asyncio.client import ApiClient

    call, errors = ApiClient.call_api, [error]

    async def call_api(self: Any, *given: Any, **named: Any) -> Any:
        if errors and ("watch", "true") in named["query_params"]:
            raise errors.pop()
        return await call(self, *given, **named)

    monkeypatch.setattr(ApiClient, "call_api", call_api)


@pytest.mark.parametrize("what", ["token file", "empty token file", "text", "no object"])
async def test_watch_goes_on_after_credentials_or_an_answer_that_cannot_be_read(
    cluster: FakeKubernetes, trial: Trial, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    from kubernetes_asyncio.config import ConfigException

    monkeypatch.setattr(kubernetes_client, "RETRY_S", 0.01)
    launcher = launcher_of(cluster)
    trial_ends = asyncio.create_task(launcher.run(trial))
    job = await cluster.job(0)
    cluster.set_status(job, running())
    if "file" in what:
        missing = FileNotFoundError("/var/run/secrets/token")
        empty = ConfigException("Token file exists but empty.")
        fail_next_watch(monkeypatch, missing if what == "token file" else empty)
    else:
        cluster.garbage = b"<html>" if what == "text" else b'{"type": "MODIFIED", "object": {}}'
    cluster.end_watches()
    cluster.set_status(job, ended(3, "Error"))
    assert (await trial_ends).error == "exit code 3 (Error)"
    await launcher.close()


async def test_watch_that_ends_fails_its_trials_and_is_restarted_for_the_next(
    cluster: FakeKubernetes, trial: Trial, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher = launcher_of(cluster)
    trial_ends = asyncio.create_task(launcher.run(trial))
    job = await cluster.job(0)
    cluster.set_status(job, running())
    fail_next_watch(monkeypatch, RuntimeError("Session is closed"))
    cluster.end_watches()
    with pytest.raises(LaunchError, match="watch of the pods ended: RuntimeError"):
        await trial_ends
    assert cluster.deleted == [job]
    trial_ends = asyncio.create_task(launcher.run(replace(trial, trial_id="next")))
    cluster.set_status(await cluster.job(1), ended())
    assert (await trial_ends).end is AgentEnd.EXITED
    await launcher.close()


async def test_end_that_a_silent_watch_does_not_show_is_found_at_the_deadline(
    cluster: FakeKubernetes, trial: Trial
) -> None:
    launcher = launcher_of(cluster)
    trial_ends = asyncio.create_task(launcher.run(replace(trial, timeout_s=0.5)))
    job = await cluster.job(0)
    cluster.set_status(job, running())
    await cluster.silence_watches()
    cluster.set_status(job, ended(message="0.5"))
    result = await trial_ends
    assert (result.end, result.reward) == (AgentEnd.EXITED, 0.5)
    await launcher.close()


async def test_trial_is_no_timeout_if_the_api_does_not_answer_at_its_deadline(
    cluster: FakeKubernetes, trial: Trial
) -> None:
    launcher = launcher_of(cluster)
    trial_ends = asyncio.create_task(launcher.run(replace(trial, timeout_s=2.0)))
    job = await cluster.job(0)
    cluster.set_status(job, running())
    await cluster.silence_watches()
    cluster.refused["pods"] = "cannot get"
    with pytest.raises(LaunchError, match="403 cannot get"):
        await trial_ends
    await launcher.close()


async def test_silent_watch_is_replaced(
    cluster: FakeKubernetes, trial: Trial, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubernetes_client, "RETRY_S", 0.01)
    monkeypatch.setattr(kubernetes_client, "SILENT_S", 0.2)
    launcher = launcher_of(cluster)
    trial_ends = asyncio.create_task(launcher.run(trial))
    job = await cluster.job(0)
    cluster.set_status(job, running())
    await cluster.silence_watches()
    cluster.set_status(job, ended(3, "Error"))
    assert (await trial_ends).error == "exit code 3 (Error)"
    await launcher.close()


@pytest.mark.parametrize("renewed", [True, False])
async def test_credentials_that_have_expired_are_read_again(
    tmp_path: Path, trial: Trial, monkeypatch: pytest.MonkeyPatch, renewed: bool
) -> None:
    monkeypatch.setattr(kubernetes_client, "RETRY_S", 0.01)
    version, given = "client.authentication.k8s.io/v1", tmp_path / "credential.json"

    def give(token: str) -> None:
        made = {"apiVersion": version, "kind": "ExecCredential", "status": {"token": token}}
        given.write_text(json.dumps(made))

    program = {"apiVersion": version, "command": "cat", "args": [str(given)]}
    give("first")
    async with fake_kubernetes(tmp_path, {"exec": program}) as cluster:
        cluster.token = "first"
        launcher = launcher_of(cluster)
        trial_ends = asyncio.create_task(launcher.run(trial))
        job = await cluster.job(0)
        cluster.set_status(job, running())
        if renewed:
            give("second")
        cluster.token = "second"
        cluster.end_watches()
        cluster.set_status(job, ended(3, "Error"))
        if renewed:
            assert (await trial_ends).error == "exit code 3 (Error)"
        else:
            with pytest.raises(LaunchError, match="401 Unauthorized; the credentials"):
                await trial_ends
        await launcher.close()


async def test_trial_that_is_cancelled_while_its_job_is_created_leaves_no_job(
    cluster: FakeKubernetes, trial: Trial
) -> None:
    cluster.creation = asyncio.Event()
    launcher = launcher_of(cluster)
    trial_ends = asyncio.create_task(launcher.run(trial))
    await cluster.creating.wait()
    trial_ends.cancel()
    await asyncio.wait([trial_ends], timeout=0.2)
    cluster.creation.set()
    with pytest.raises(asyncio.CancelledError):
        await trial_ends
    assert (len(cluster.created), cluster.jobs) == (1, {})
    await launcher.close()


@pytest.mark.parametrize("refused", [True, False])
async def test_warning_says_whether_the_job_was_deleted(
    cluster: FakeKubernetes,
    trial: Trial,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    refused: bool,
) -> None:
    monkeypatch.setattr(kubernetes, "END_TIMEOUT_S", 0.3)
    launcher = launcher_of(cluster, ProcessConfig(grace_s=0), patience_s=60)
    trial_ends = asyncio.create_task(launcher.run(trial))
    job = await cluster.job(0)
    (cluster.unavailable if refused else cluster.kept).add("jobs")
    trial_ends.cancel()
    with pytest.raises(asyncio.CancelledError):
        await trial_ends
    why = "could not be deleted: the API does not answer" if refused else "but its pod has not"
    assert job in caplog.text
    assert why in caplog.text
    await launcher.close()


async def test_pod_that_never_starts_is_reported_with_its_reason(
    cluster: FakeKubernetes, trial: Trial
) -> None:
    unschedulable = {
        "phase": "Pending",
        "conditions": [
            {
                "type": "PodScheduled",
                "status": "False",
                "reason": "Unschedulable",
                "message": "0/3 nodes are available",
            }
        ],
    }
    with pytest.raises(LaunchError, match="Unschedulable: 0/3 nodes are available"):
        await run(cluster, trial, unschedulable, room_timeout_s=2)
    assert cluster.jobs == {}


async def test_job_without_a_pod_is_reported(cluster: FakeKubernetes, trial: Trial) -> None:
    cluster.without_pods = True
    with pytest.raises(LaunchError, match="no pod was created"):
        await run(cluster, trial, room_timeout_s=0.3)


@pytest.mark.parametrize("kind", ["jobs", "pods", "secrets"])
async def test_missing_permission_fails_the_trial_with_the_missing_role(
    cluster: FakeKubernetes, trial: Trial, kind: str
) -> None:
    cluster.refused[kind] = f"{kind} is forbidden: cannot create"
    launcher = launcher_of(cluster)
    with pytest.raises(LaunchError, match=rf"403 {kind} is forbidden.*the role in docs"):
        await launcher.run(trial)
    await launcher.close()


async def test_cluster_that_does_not_answer_fails_the_trial(tmp_path: Path, trial: Trial) -> None:
    async with fake_kubernetes(tmp_path) as cluster:
        launcher = launcher_of(cluster)
    with pytest.raises(LaunchError, match="kubernetes: POST"):
        await launcher.run(trial)
    await launcher.close()


async def test_task_that_no_secret_holds_is_refused(
    cluster: FakeKubernetes, make_trial: MakeTrial
) -> None:
    launcher = launcher_of(cluster)
    with pytest.raises(LaunchError, match="a Secret holds 900000; put its files into the image"):
        await launcher.run(make_trial(files="x" * 1_000_000))
    assert cluster.jobs == {}
    await launcher.close()


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"argv": ["{python}", "agent.py"]}, "a place on the trainer's machine"),
        ({"pod": {"containers": []}}, "the launcher sets containers"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        KubernetesConfig.model_validate({"image": "agent:1", **settings})
