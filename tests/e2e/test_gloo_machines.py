"""Two real vLLM servers with two workers each, in network namespaces of their own, take the weights
of a trainer with two FSDP2 ranks over gloo: ten updates, and each kind of loss in one of them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from proxy.engines.address import EngineAddress
from proxy.engines.vllm_nodes import ServerPart
from proxy.engines.vllm_server import VllmConfig, VllmServer
from tests.e2e.gloo_trainer import RANKS, TOLERANCE
from tests.e2e.test_gloo_engines import START_TIMEOUT_S
from tests.e2e.test_weight_sync import IDS
from tests.namespaces import enter, machines, processes
from trainer.weight_sync.control import EngineControl
from trainer.weight_sync.sync import verify_engines

WORKERS = 2
UPDATES = 10
CONFIG = VllmConfig(
    max_context_tokens=256,
    max_sequences=4,
    weight_transfer="gloo",
    start_timeout_s=START_TIMEOUT_S,
    args=("--tensor-parallel-size", str(WORKERS)),
    env={"VLLM_CPU_OMP_THREADS_BIND": "nobind"},
)


class Machine:
    """A network namespace with a vLLM server, or a part of one."""

    def __init__(
        self,
        name: str,
        address: str,
        model: Path,
        folder: Path,
        part: ServerPart | None = None,
    ) -> None:
        self.name, self._address, self._model, self._part = name, address, model, part
        self._log = folder / f"{name}.log"
        self._thread = ThreadPoolExecutor(1, initializer=enter, initargs=(name,))
        self._runner = asyncio.Runner()
        self._server: VllmServer | None = None

    @property
    def url(self) -> str:
        assert self._server is not None
        return self._server.url

    def start(self) -> Future[None]:
        def start() -> None:
            self._server = VllmServer(
                CONFIG,
                self._model,
                log=self._log,
                dtype="float32",
                host=self._address,
                part=self._part,
            )
            self._runner.run(self._server.start())

        return self._thread.submit(start)

    def kill_a_worker(self) -> None:
        *_, last = (pid for pid, name in processes(self.name).items() if "Worker" in name)
        os.kill(last, signal.SIGKILL)

    def stop(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            self._thread.submit(self._runner.run, server.stop()).result()

    def close(self) -> None:
        self.stop()
        self._thread.submit(self._runner.close).result()
        self._thread.shutdown()


class TrainerProcess:
    """The ranks of a trainer, as processes."""

    def __init__(self, model: Path, store: Path) -> None:
        program = (sys.executable, "-m", "tests.e2e.gloo_trainer")
        self.ranks = [
            subprocess.Popen(
                [*program, str(rank), f"file://{store}", str(model), json.dumps(IDS)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(RANKS)
        ]

    def ask(self, **order: Any) -> dict[str, Any]:
        """Returns the answer, or that it is sending the tensor at which it was to stop."""
        self._write(json.dumps(order))
        return self.answer()

    def continue_(self) -> dict[str, Any]:
        self._write("")
        return self.answer()

    def answer(self) -> dict[str, Any]:
        out = self.ranks[0].stdout
        assert out is not None
        answer: dict[str, Any] = json.loads(out.readline())
        return answer

    def kill(self) -> None:
        for rank in self.ranks:
            rank.kill()
            rank.communicate()

    def _write(self, line: str) -> None:
        into = self.ranks[0].stdin
        assert into is not None
        into.write(line + "\n")
        into.flush()


@contextmanager
def trainer(model: Path, store: Path) -> Iterator[TrainerProcess]:
    started = TrainerProcess(model, store)
    try:
        yield started
    finally:
        started.kill()


def check(answer: dict[str, Any], engines: int) -> list[float]:
    """Every worker has what was sent, and computes the trainer's log-probabilities, which it
    returns."""
    assert "error" not in answer, answer
    assert answer["digests"] == [answer["sent"]] * (1 + engines * WORKERS)
    assert answer["difference"] <= TOLERANCE
    scores: list[float] = answer["scores"]
    return scores


def serves(machine: Machine, version: int, scores: list[float]) -> None:
    """The engine samples with exactly these weights after an interrupted update."""
    control = EngineControl([machine.url], timeout_s=60.0)  # a paused engine does not answer
    assert control.weight_versions() == [str(version)]
    assert verify_engines(control, IDS, scores, TOLERANCE) <= TOLERANCE
    control.close()


@pytest.fixture
def engines(tiny_model: Path, tmp_path: Path) -> Iterator[tuple[Machine, Machine]]:
    with ExitStack() as stack:
        named = stack.enter_context(machines(2))
        first, second = (Machine(name, at, tiny_model, tmp_path) for name, at in named)
        for each in (first, second):
            stack.callback(each.close)
        for started in [first.start(), second.start()]:
            started.result()
        yield first, second


@pytest.mark.long
def test_weights_reach_every_worker_or_none(
    engines: tuple[Machine, Machine], tiny_model: Path, tmp_path: Path
) -> None:
    first, second = engines
    with ExitStack() as stack:
        sender = stack.enter_context(trainer(tiny_model, tmp_path / "store-1"))
        urls = [first.url, second.url]
        scores: list[float] = []
        for version in range(1, UPDATES + 1):
            order = {"urls": urls} if version == 1 else {}
            answer = sender.ask(version=version, disturb=version, **order)
            assert answer.get("scores") != scores
            scores = check(answer, engines=2)

        # An engine is lost: the update fails, the other engine keeps its weights, and takes the
        # next update alone.
        assert sender.ask(version=11, disturb=11, stop_at=5) == {"sending": 5}
        second.kill_a_worker()
        assert EngineAddress.parse(second.url).url in sender.continue_()["error"]
        second.stop()
        serves(first, UPDATES, scores)
        scores = check(sender.ask(version=11, urls=[first.url]), engines=1)

        # An engine joins late, and gets the weights that the other one has.
        second.start().result()
        late = check(sender.ask(version=11, urls=[first.url, second.url]), engines=2)
        assert late == scores

        # The trainer is lost: both engines keep their weights, and its next start updates them.
        assert sender.ask(version=12, disturb=12, stop_at=5) == {"sending": 5}
        sender.kill()
        for each in (first, second):
            serves(each, 11, scores)
        restarted = stack.enter_context(trainer(tiny_model, tmp_path / "store-2"))
        urls = [first.url, second.url]
        check(restarted.ask(version=12, disturb=13, urls=urls), engines=2)
