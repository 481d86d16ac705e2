"""Causes of failed trials: one name for one cause, whatever trial it ended."""

from __future__ import annotations

import pytest

from proxy.run_files.causes import cause_of, is_infrastructure


@pytest.mark.parametrize(
    ("first", "second", "cause"),
    [
        (
            "the agent failed (exit code 2); see /tmp/a/trials/train-17-QaxBeGkeMApu/agent.log",
            "the agent failed (exit code 2); see runs/b/trials/heldout-2-4kN3ej6Dj28o/agent.log",
            "the agent failed (exit code 2)",
        ),
        (
            "OSError: [Errno 28] No space left on device: '/tmp/x/train-1-AbPKSthLiicd/work/a.txt'",
            "OSError: [Errno 28] No space left on device: '/tmp/x/train-2-4kN3ej6Dj28o/work/a.txt'",
            "OSError: [Errno 28] No space left on device: '…/a.txt'",
        ),
        (
            "ProxyError: POST http://127.0.0.1:41231/sessions/train-1-AbPKSthLiicd: status 503",
            "ProxyError: POST http://127.0.0.1:38817/sessions/train-2-4kN3ej6Dj28o: status 503",
            "ProxyError: POST http://#.#/sessions/#: status 503",
        ),
        (
            "verifier: timed out after 120.0 s (pid 20847) at 0x7fbf12c36e90",
            "verifier: timed out after 119.7 s (pid 311) at 0x7fbf00c36e91",
            "verifier: timed out after # s (pid #) at #",
        ),
        (
            "\x1b[31mValueError\x1b[0m: no cat\nmore",
            "ValueError: no cat\nelse",
            "ValueError: no cat",
        ),
        (None, "  \n", "no error was recorded"),
    ],
)
def test_one_cause_has_one_name_in_all_trials(first: str | None, second: str, cause: str) -> None:
    assert cause_of(first) == cause_of(second)
    if "http" not in cause:
        assert cause_of(first) == cause
    assert "AbPKSthLiicd" not in cause_of(first)


def test_what_tells_causes_apart_stays() -> None:
    assert cause_of("the agent ended with exit code 1") != cause_of(
        "the agent ended with exit code 2"
    )
    assert cause_of("status 404 of POST /x/a") != cause_of("status 503 of POST /x/a")
    assert cause_of("no module named tools") == "no module named tools"


@pytest.mark.parametrize(
    "error",
    [
        "ProxyClientError: the proxy cannot be reached",
        "EngineError: engine-0 did not answer",
        "OSError: [Errno 28] No space left on device",
        "OSError: [Errno 24] Too many open files",
    ],
)
def test_infrastructure_is_told_from_agents(error: str) -> None:
    assert is_infrastructure(error)
    assert not is_infrastructure("the agent never had an answer from the model (exit code 2)")
    assert not is_infrastructure("RewardError: grader verify.py:grade: KeyError: 'price'")
