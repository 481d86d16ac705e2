"""What the kubelet makes of a Job's command and variables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_loop.extras.kubernetes.launcher import KubernetesConfig
from agent_loop.extras.kubernetes.objects import job_object
from agent_loop.records import Task, Trial

TRIAL = Trial(
    trial_id="t-1",
    task=Task("t", {"prompt": "do it"}),
    base_url="http://proxy/v1",
    api_key="sk-secret",
    model="policy",
    directory=Path("/trials/t-1"),
    timeout_s=60,
    seed=1,
)


def expanded(text: str, variables: Mapping[str, str]) -> str:
    """As `Expand` of Kubernetes' third_party/forked/golang/expansion/expand.go does it."""
    found, rest = "", text
    while rest:
        opened, closed = rest.startswith("$("), rest.find(")")
        if rest.startswith("$$"):
            found, rest = found + "$", rest[2:]
        elif opened and closed > 0:
            found += variables.get(rest[2:closed], rest[: closed + 1])
            rest = rest[closed + 1 :]
        else:
            found, rest = found + rest[0], rest[1:]
    return found


def started(
    prompt: str, argv: tuple[str, ...], env: Mapping[str, str]
) -> tuple[list[str], dict[str, str]]:
    """The command and the variables with which the kubelet starts the container."""
    trial = replace(TRIAL, task=Task("t", {"prompt": prompt}))
    job = job_object(KubernetesConfig(image="agent:1", argv=argv, env=env), trial, "run", 5)
    assert trial.api_key not in str(job)
    (container,) = job["spec"]["template"]["spec"]["containers"]
    variables: dict[str, str] = {}
    for each in container["env"]:
        secret = "valueFrom" in each
        variables[each["name"]] = trial.api_key if secret else expanded(each["value"], variables)
    return [expanded(word, variables) for word in container["command"]], variables


@given(st.text(alphabet="$(){}xé ", max_size=12) | st.text(max_size=12))
def test_prompt_reaches_the_agent_unchanged(prompt: str) -> None:
    command, variables = started(prompt, ("agent", "do: {prompt}"), {"WHAT": "$${prompt}"})
    assert command == ["agent", f"do: {prompt}"]
    assert (variables["TASK_PROMPT"], variables["WHAT"]) == (prompt, f"$${prompt}")


@pytest.mark.parametrize(
    "prompt",
    ["$$x^2=4$$", "kill -9 $$", "$$(OPENAI_API_KEY)", "$(AGENTIC_SESSION_KEY)", "{api_key}"],
)
def test_prompt_does_not_pull_variables(prompt: str) -> None:
    assert started(prompt, ("agent", "{prompt}"), {})[0] == ["agent", prompt]


def test_key_comes_from_the_secret_wherever_it_is_used() -> None:
    env = {"OPENAI_API_KEY": "{api_key}", "HEADER": "Bearer {api_key}"}
    command, variables = started("x", ("agent", "--key={api_key}", "$({api_key})"), env)
    assert command == ["agent", "--key=sk-secret", "$(sk-secret)"]
    assert (variables["OPENAI_API_KEY"], variables["HEADER"]) == ("sk-secret", "Bearer sk-secret")
