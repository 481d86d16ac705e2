"""One real vLLM server whose two workers are in network namespaces of their own takes the weights
of a trainer with two FSDP2 ranks over gloo, and ends as a whole with its workers."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path

import pytest

from proxy.engines.vllm_nodes import ServerPart
from tests.e2e.test_gloo_machines import WORKERS, Machine, check, serves, trainer
from tests.namespaces import machines, processes

UPDATES = 3
PORT = 29500
"""Free in a new namespace."""


@pytest.fixture
def parts(tiny_model: Path, tmp_path: Path) -> Iterator[tuple[Machine, ...]]:
    """The parts of an engine, each on a machine of its own. The first one answers calls."""
    with ExitStack() as stack:
        named = stack.enter_context(machines(WORKERS))
        meeting = f"{named[0][1]}:{PORT}"
        made = tuple(
            Machine(name, at, tiny_model, tmp_path, ServerPart(node, WORKERS, meeting))
            for node, (name, at) in enumerate(named)
        )
        for each in made:
            stack.callback(each.close)
        start(made)
        yield made


def start(parts: tuple[Machine, ...]) -> None:
    started: list[Future[None]] = [each.start() for each in parts]
    for each in started:
        each.result()


@pytest.mark.long
def test_weights_reach_the_workers_of_an_engine_on_two_nodes(
    parts: tuple[Machine, ...], tiny_model: Path, tmp_path: Path
) -> None:
    first, second = parts
    with ExitStack() as stack:
        sender = stack.enter_context(trainer(tiny_model, tmp_path / "store"))
        for each in parts:
            assert sum("Worker" in name for name in processes(each.name).values()) == 1
        scores: list[float] = []
        for version in range(1, UPDATES + 1):
            order = {"urls": [first.url]} if version == 1 else {}
            answer = sender.ask(version=version, disturb=version, **order)
            assert answer.get("scores") != scores
            scores = check(answer, engines=1)
        serves(first, UPDATES, scores)

        # A node is lost in the middle of an update, which fails. The parts that are left are ended,
        # and the engine's next start gets the weights from the same trainer.
        assert sender.ask(version=4, disturb=4, stop_at=5) == {"sending": 5}
        second.kill_a_worker()
        assert "engine" in sender.continue_()["error"]
        for each in parts:
            each.stop()
            assert not processes(each.name)
        start(parts)
        scores = check(sender.ask(version=4, urls=[first.url]), engines=1)
        serves(first, 4, scores)
