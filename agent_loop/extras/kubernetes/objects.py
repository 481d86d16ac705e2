"""What a trial is in Kubernetes: a Job with one pod, a Secret, and what the pod's state means.

Invariant: a trial starts at most one pod (`backoffLimit: 0`, `restartPolicy: Never`), which gets
the key of its own session and no token of the cluster. Job and Secret end without this process,
too: by `activeDeadlineSeconds`, `ttlSecondsAfterFinished`, and the Secret's owner, the Job.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import Any

import orjson
from pydantic import Field, field_validator, model_validator

from agent_loop.errors import LaunchError
from agent_loop.launchers.agent_process import session_variables
from agent_loop.launchers.protocol import LauncherConfig
from agent_loop.processes.environment import Variables, expand
from agent_loop.records import Trial
from proxy.machine.direct_hosts import with_direct_hosts
from proxy.settings.reaching import ClusterAgents

CONTAINER = "agent"
RUN_LABEL = "agentic-rl/run"
TRIAL_LABEL = "agentic-rl/trial"
FOLDER = Path("/agentic-trial")
"""Where the pod has its task file."""
KEY_VARIABLE = "AGENTIC_SESSION_KEY"
"""The variable by which Kubernetes replaces `{api_key}`; the others may be set in `env`."""
TASK_FILE_BYTES = 900_000
"""A Secret holds at most 1 MiB."""
LOST_NODE_S = 60
"""Seconds after which a pod on a node that does not answer is deleted; Kubernetes' own default is
300."""
END_S = 60
"""Seconds that the Job of a trainer that has died may take longer than the waiting time, the trial
and its grace period together."""
OURS = frozenset({"containers", "restartPolicy", "terminationGracePeriodSeconds", "volumes"})
"""Fields of the pod that the launcher sets."""
NOT_THERE = ("{workspace}", "{directory}", "{root}", "{python}")
"""Placeholders that name places on the trainer's machine."""
HOPELESS = frozenset({"InvalidImageName", "ErrImageNeverPull"})
"""Reasons why a container that waits will not start."""
PULL_FAILS = ("ErrImagePull", "ImagePullBackOff")
"""Reasons why it waits while its image is tried again: the name may be wrong, or a registry that
many pods ask at once may refuse for minutes."""

TTL_S = 600
"""Seconds after which Kubernetes deletes the Job of an agent that has ended: long enough for a look
at its pod."""

Object = dict[str, Any]
"""A resource of Kubernetes, as parsed JSON."""


class JobSettings(ClusterAgents, Variables, LauncherConfig):
    """The part of the launcher's section that a Job is made of."""

    image: str = Field(min_length=1)
    """The image of the agent's container."""
    argv: tuple[str, ...] = ()
    """The program and its arguments; empty: the image's own entry point. `{prompt}`,
    `{task_file}`, `{model}`, `{base_url}`, `{api_key}`, `{task.FIELD}`, … are replaced."""
    resources: Mapping[str, Mapping[str, str]] = Field(default_factory=dict)
    """The container's `requests` and `limits`, such as `{requests: {cpu: "1", memory: 2Gi}}`."""
    labels: Mapping[str, str] = Field(default_factory=dict)
    """Additional labels of Jobs and pods, for example those that a network policy admits."""
    pod: Mapping[str, Any] = Field(default_factory=dict)
    """Further fields of the pod's specification, such as `nodeSelector`, `tolerations`,
    `imagePullSecrets` or `runtimeClassName`."""
    namespace: str | None = None
    """The namespace of the Jobs. None: that of the kubeconfig, or of this process's own pod."""
    agents: int = Field(100, ge=1)
    room_timeout_s: float = Field(1800.0, gt=0)

    @property
    def needs_prompt(self) -> bool:
        texts = (*self.argv, *self.env.values())
        return any("{prompt}" in text or "TASK_PROMPT" in text for text in texts)

    @field_validator("pod")
    @classmethod
    def _leaves_ours(cls, pod: Mapping[str, Any]) -> Mapping[str, Any]:
        if taken := sorted(OURS & pod.keys()):
            raise ValueError(f"the launcher sets {', '.join(taken)}; remove them")
        return pod

    @model_validator(mode="after")
    def _names_no_local_place(self) -> JobSettings:
        for text in (*self.argv, *self.env.values()):
            if found := [name for name in NOT_THERE if name in text]:
                raise ValueError(
                    f"{text!r}: {found[0]} is a place on the trainer's machine; a pod has "
                    "{task_file} and what its image contains"
                )
        return self


def object_name(trial_id: str) -> str:
    """Name of the trial's Job and Secret, and value of its label; ids may contain characters that
    names may not."""
    return f"agent-{hashlib.sha256(trial_id.encode()).hexdigest()[:24]}"


def job_object(settings: JobSettings, trial: Trial, run: str, grace_s: int) -> Object:
    """`grace_s`: seconds between SIGTERM and SIGKILL."""
    name = object_name(trial.trial_id)
    labels = {**settings.labels, RUN_LABEL: run, TRIAL_LABEL: name}
    end_s = settings.room_timeout_s + trial.timeout_s + grace_s + END_S
    metadata = {"labels": labels, "annotations": {"agentic-rl/trial-id": trial.trial_id}}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name, **metadata},
        "spec": {
            "backoffLimit": 0,
            "activeDeadlineSeconds": math.ceil(end_s),
            "ttlSecondsAfterFinished": TTL_S,
            "template": {"metadata": metadata, "spec": _pod(settings, trial, name, grace_s)},
        },
    }


def secret_object(trial: Trial, job: Object) -> Object:
    """What the pod waits for: the session's key and the task file. It is deleted with its Job.

    Raises:
        LaunchError: the task is too large.
    """
    task = orjson.dumps(trial.agent_data, default=str)
    if len(task) > TASK_FILE_BYTES:
        raise LaunchError(
            f"kubernetes: task {trial.task.task_id!r} has {len(task)} bytes, a Secret holds "
            f"{TASK_FILE_BYTES}; put its files into the image"
        )
    meta = job["metadata"]
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": meta["name"], "uid": meta["uid"]}
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {
            "name": meta["name"],
            "labels": meta["labels"],
            "ownerReferences": [owner],
        },
        "stringData": {"api-key": trial.api_key, "task.json": task.decode()},
    }


def _pod(settings: JobSettings, trial: Trial, name: str, grace_s: int) -> Object:
    inside = replace(trial, directory=FOLDER)
    keys = {"OPENAI_API_KEY", "ANTHROPIC_API_KEY", "GEMINI_API_KEY"}
    given = {key: value for key, value in session_variables(inside).items() if key not in keys}
    plain = {key: value.replace("$", "$$") for key, value in given.items()}
    plain |= {key: _value(value, inside) for key, value in settings.env.items()}
    plain = with_direct_hosts(plain, trial.base_url)
    secret = {"secretKeyRef": {"name": name, "key": "api-key"}}
    secrets = [KEY_VARIABLE, *sorted(keys - plain.keys())]
    container: Object = {
        "name": CONTAINER,
        "image": settings.image,
        "env": [
            *({"name": key, "valueFrom": secret} for key in secrets),
            *({"name": key, "value": value} for key, value in plain.items()),
        ],
        "resources": {kind: dict(amounts) for kind, amounts in settings.resources.items()},
        "volumeMounts": [{"name": "task", "mountPath": str(FOLDER), "readOnly": True}],
    }
    if settings.argv:
        container["command"] = [_value(word, inside) for word in settings.argv]
    items = [{"key": "task.json", "path": inside.task_file.name}]
    more = dict(settings.pod)
    lost = ({"key": f"node.kubernetes.io/{why}"} for why in ("not-ready", "unreachable"))
    soon = {"operator": "Exists", "effect": "NoExecute", "tolerationSeconds": LOST_NODE_S}
    return {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        **more,
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": grace_s,
        "tolerations": [*more.get("tolerations", []), *({**each, **soon} for each in lost)],
        "containers": [container],
        "volumes": [{"name": "task", "secret": {"secretName": name, "items": items}}],
    }


def _value(template: str, trial: Trial) -> str:
    """The command's word or the variable's value, in which Kubernetes replaces `$(NAME)` by an
    earlier variable and every `$$` by `$` (its `third_party/forked/golang/expansion/expand.go`).
    The key stays in the Secret: Kubernetes puts it in."""
    parts = template.split("{api_key}")
    return f"$({KEY_VARIABLE})".join(expand(part, trial).replace("$", "$$") for part in parts)


class PodPhase(StrEnum):
    """What has become of a trial's pod."""

    WAITING = "waiting"
    """For a node, its image, or its Secret."""
    RUNNING = "running"
    ENDED = "ended"
    """Its container ended, with `exit_code`."""
    HOPELESS = "hopeless"
    """Its container cannot be started."""
    LOST = "lost"
    """It was evicted, preempted or deleted, or its node was lost."""


@dataclass(frozen=True, slots=True)
class PodState:
    """Example: PodState(PodPhase.ENDED, "OOMKilled", exit_code=137, wall_s=8.0)"""

    phase: PodPhase
    reason: str = ""
    exit_code: int = 0
    wall_s: float = 0.0
    pull_fails: bool = False
    """While it waits: its image could not be pulled, and Kubernetes tries again."""
    message: str = ""
    """What the container wrote to /dev/termination-log."""


def pod_state(pod: Object) -> PodState:
    """What the pod's status says. A container that was killed with its pod ends with a code, too;
    that is not the agent's."""
    status = pod.get("status", {})
    states = {each["name"]: each.get("state", {}) for each in status.get("containerStatuses", [])}
    state = states.get(CONTAINER, {})
    ended = state.get("terminated")
    disrupted = _condition(status, "DisruptionTarget", "True")
    if disrupted or (status.get("phase") == "Failed" and (status.get("reason") or not ended)):
        return PodState(PodPhase.LOST, _reason(disrupted or status))
    if ended and ended.get("exitCode") and "deletionTimestamp" in pod["metadata"]:
        return PodState(PodPhase.LOST, "it was deleted")
    if ended:
        return PodState(
            PodPhase.ENDED,
            ended.get("reason", ""),
            ended.get("exitCode", 0),
            _seconds(ended.get("startedAt"), ended.get("finishedAt")),
            message=ended.get("message", ""),
        )
    if "running" in state:
        return PodState(PodPhase.RUNNING)
    waiting = state.get("waiting", {})
    if waiting.get("reason") in HOPELESS:
        return PodState(PodPhase.HOPELESS, _reason(waiting))
    scheduled = _condition(status, "PodScheduled", "False")
    pull_fails = waiting.get("reason") in PULL_FAILS
    reason = _reason(waiting or scheduled or {})
    return PodState(PodPhase.WAITING, reason, pull_fails=pull_fails)


def is_over(pod: Object) -> bool:
    """Whether all of its containers have ended, also those that others added to it."""
    return pod.get("status", {}).get("phase") in ("Succeeded", "Failed")


def failed_condition(job: Object) -> str:
    """Why the Job has failed or is about to, once its pod has ended; empty if it has not."""
    status = job.get("status", {})
    found = _condition(status, "Failed", "True") or _condition(status, "FailureTarget", "True")
    return str(found.get("reason", "")) if found else ""


def _condition(status: Object, kind: str, value: str) -> Object | None:
    conditions = (each for each in status.get("conditions", []) if each.get("type") == kind)
    return next((each for each in conditions if each.get("status") == value), None)


def _reason(found: Object) -> str:
    return ": ".join(str(found[name]) for name in ("reason", "message") if found.get(name))


def _seconds(started: str | None, finished: str | None) -> float:
    if not started or not finished:
        return 0.0
    began, ended = (datetime.fromisoformat(at) for at in (started, finished))
    return (ended - began).total_seconds()
