"""The real parts of the test run: a tiny checkpoint, one vLLM on it, one PostgreSQL."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web_app

from proxy.engines.vllm_server import VllmConfig, VllmServer
from proxy.http.valid_json import valid_json
from tests.needs import skip_or_fail
from tests.postgres_server import binaries, postgres_server

TINY_CONTEXT_TOKENS = 2048
_NUMBERS = itertools.count()

# TRL sets it to ERROR when it is imported, and tests wait for lines of vLLM's log.
os.environ.setdefault("VLLM_LOGGING_LEVEL", "INFO")


# Fixtures, markers and folders of tests that start servers, or programs other than Python.
PROGRAM_FIXTURES = {"vllm", "postgres"}
PROGRAM_MARKERS = {"engine", "agents", "needs"}
PROGRAM_FOLDERS = {Path(__file__).parent / name for name in ("attacks", "e2e", "gpu")}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks the tests that `make test-fast` leaves out; leaves long ones to `make test-long`.

    Files with programs come first: a worker of xdist that is left alone with the last file then has
    little to do.
    """
    if "long" not in config.option.markexpr:
        items[:] = [item for item in items if not item.get_closest_marker("long")]
    for item in items:
        fixtures = PROGRAM_FIXTURES & set(getattr(item, "fixturenames", ()))
        callspec = getattr(item, "callspec", None)
        parameters = list(callspec.params.values()) if callspec else []
        markers = PROGRAM_MARKERS & {marker.name for marker in item.iter_markers()}
        folders = PROGRAM_FOLDERS & set(item.path.parents)
        if fixtures or markers or folders or "postgres" in parameters:
            item.add_marker("programs")
    items.sort(key=lambda item: not PROGRAM_FOLDERS & set(item.path.parents))


@pytest.hookimpl(wrapper=True)
def pytest_report_to_serializable() -> Iterator[Any]:
    """A test's log can hold lone surrogates, which a worker of xdist cannot send."""
    return valid_json((yield))


@pytest.fixture(autouse=True)
def own_state_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Each test has its own user's folder, in which the proxy's default store is."""
    folder = tmp_path_factory.getbasetemp() / f"state-{next(_NUMBERS)}"
    monkeypatch.setenv("XDG_STATE_HOME", str(folder))


def pytest_runtest_setup(item: pytest.Item) -> None:
    for marker in item.iter_markers("needs"):
        if marker.args[0] is not None:
            skip_or_fail(marker.args[0])


def pytest_runtest_teardown() -> None:
    """aiohttp keeps the handlers of the last 1024 routes, and with them all that their applications
    have: a worker had 7 GB of ended proxies at the end of all tests."""
    web_app._cached_build_middleware.cache_clear()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a Qwen3 checkpoint with random weights (fp32), tokenizer and chat template."""
    from examples.starter_model.checkpoint import Shape, new_model, save_model
    from examples.starter_model.tokenizer import save_tokenizer, train_tokenizer

    folder = tmp_path_factory.mktemp("tiny-model")
    shape = Shape(
        vocab_size=512, hidden_size=64, layers=2, heads=2, context_tokens=TINY_CONTEXT_TOKENS
    )
    tokenizer = train_tokenizer([__doc__ or ""], shape.vocab_size)
    save_tokenizer(tokenizer, folder, shape.context_tokens)
    end, padding = (tokenizer.token_to_id(word) for word in ("<|im_end|>", "<|endoftext|>"))
    assert end is not None
    assert padding is not None
    save_model(new_model(shape, seed=0), folder, end_of_turn=end, padding=padding)
    return folder


@pytest.fixture(scope="session")
def vllm(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    """The one vLLM server of the test run. Who updates its weights puts the old ones back."""
    config = VllmConfig(max_sequences=32, weight_transfer="shm", nice=1)
    log = tmp_path_factory.mktemp("vllm") / "vllm.log"
    with asyncio.Runner() as runner:
        server = VllmServer(config, tiny_model, log=log, dtype="float32", served_model_name="tiny")
        runner.run(server.start())
        yield server
        runner.run(server.stop())


@pytest.fixture(scope="session")
def postgres() -> Iterator[str]:
    """URL of the PostgreSQL server of the test run."""
    programs = binaries()
    if programs is None:
        skip_or_fail("PostgreSQL is not installed: apt-get install postgresql")
    with postgres_server(programs) as url:
        yield url
