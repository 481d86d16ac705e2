"""What trials need of an SDK is built once, before they are forked."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path

import openai
import pytest

from agent_loop.launchers.python import PythonConfig
from agent_loop.processes import rehearsal
from tests.agent_loop.conftest import MakeTrial

AGENT = """
import openai
from openai.types.chat import ChatCompletion

def run(call):
    return float(ChatCompletion.__pydantic_complete__)
"""


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kinds of client that were closed after their calls."""
    kinds: list[str] = []
    for kind in (openai.OpenAI, openai.AsyncOpenAI):

        def close(self: object, _close: object = kind.close) -> object:
            kinds.append(type(self).__name__)
            return _close(self)  # type: ignore[operator]

        monkeypatch.setattr(kind, "close", close)
    return kinds


async def test_trials_find_the_validators_of_the_sdk_built(
    make_trial: MakeTrial, tmp_path: Path
) -> None:
    file = tmp_path / "uses_the_sdk.py"
    file.write_text(AGENT)
    launcher = PythonConfig(target=f"{file}:run").build()
    try:
        assert (await launcher.run(make_trial())).reward == 1.0
    finally:
        await launcher.close()


async def test_failed_rehearsal_is_reported_and_the_trial_runs(
    make_trial: MakeTrial, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "replaces_the_client.py"
    file.write_text(AGENT + "openai.OpenAI = openai.AsyncOpenAI = None\n")
    launcher = PythonConfig(target=f"{file}:run").build()
    try:
        assert (await launcher.run(make_trial())).reward == 0.0
    finally:
        await launcher.close()
    assert capfd.readouterr().err.count("the SDK was not rehearsed: TypeError") == 2


async def test_both_clients_are_used_directly_and_nothing_stays_open(
    used: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")

    def open_sockets() -> int:
        found = (os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd"))
        return sum("socket:" in path for path in found)

    before = open_sockets(), threading.active_count()
    rehearsing = threading.Thread(target=rehearsal.rehearse)
    rehearsing.start()
    rehearsing.join()
    assert used == ["OpenAI", "AsyncOpenAI"]
    assert (open_sockets(), threading.active_count()) == before
    assert "not rehearsed" not in capfd.readouterr().err


async def test_clients_do_not_wait_for_a_server_that_is_silent(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    released = threading.Event()

    def silent(self: object) -> None:
        released.wait()

    monkeypatch.setattr(rehearsal._Answers, "do_POST", silent)
    monkeypatch.setattr(rehearsal, "TIMEOUT_S", 0.01)
    attempts = ("_openai", "_async_openai")
    for name in attempts:
        use = getattr(rehearsal, name)

        def give_up(base_url: str, _use: object = use, last: bool = name == attempts[-1]) -> None:
            try:
                _use(base_url)  # type: ignore[operator]
            finally:
                if last:
                    released.set()

        monkeypatch.setattr(rehearsal, name, give_up)
    await asyncio.to_thread(rehearsal.rehearse)
    assert capfd.readouterr().err.count("the SDK was not rehearsed: APITimeoutError") == 2
