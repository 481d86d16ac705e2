"""A newcomer's own dialect, launcher, loss and extra of the proxy: each is defined here, outside of
the packages, named by its string in a configuration, and used."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import aiohttp
import numpy as np
import orjson
import pytest
from aiohttp import web
from torch import Tensor

from agent_loop.launchers.protocol import Launcher, LauncherConfig
from agent_loop.processes.host import PROCESS, ProcessConfig
from agent_loop.records import AgentEnd, AgentResult, Task, Trial
from agent_loop.remote_agent_config import RemoteAgentConfig
from agent_loop.remote_agent_loop import RemoteAgentLoop
from proxy.control.door import json_answer
from proxy.conversation import Conversation, Message
from proxy.errors import ProxyError
from proxy.extra import Core, Extra, ExtraConfig
from proxy.http.route import route, routes_of
from proxy.records import SessionKind, Turn
from proxy.rendering.deltas import TextDelta
from proxy.wire.dialect import Call, Headers, Options, Outcome, Piece
from proxy.wire.fields import Fields
from tests.proxy.conftest import ADMIN_KEY, StartProxy
from tests.proxy.conftest import checkpoint as checkpoint
from tests.proxy.conftest import rendering as rendering
from tests.proxy.conftest import start_proxy as start_proxy
from tests.trainer.rollouts import group
from trainer.batch import trained_batch
from trainer.cluster.rank_models import models_of_rank
from trainer.config import TrainerConfig
from trainer.learning.learner import Learner

HERE = "tests.test_a_newcomers_parts"
EXTRA = {"target": f"{HERE}:OdometerConfig", "settings": {"unit": "tokens"}}
OWN_PART = """
from proxy.errors import ConfigurationError
from proxy.extra import ExtraConfig

class OwnConfig(ExtraConfig):
    def build(self):
        raise ConfigurationError("no odometer here")
"""


class Telegrams:
    """A dialect: one text in, one text out. A stream is lines of JSON, each with more text."""

    name = "telegrams"
    route = "telegrams"

    def parse(self, fields: Fields, headers: Headers) -> Call:
        return Call(
            model=fields.text("to", ""),
            conversation=Conversation([Message("user", fields.text("text"))]),
            options=Options(max_tokens=fields.integer("words", 1, 1000)),
            stream=fields.flag("by_letter"),
        )

    def whole(self, call: Call, answer_id: str, outcomes: Sequence[Outcome]) -> bytes:
        (outcome,) = outcomes
        return orjson.dumps({"text": outcome.message.text, "why": outcome.finish_reason})

    def writer(self, call: Call, answer_id: str) -> TelegramWriter:
        return TelegramWriter()

    def error(self, error: ProxyError) -> bytes:
        return orjson.dumps({"refused": error.message})


class TelegramWriter:
    def start(self, prompt_tokens: int, turn: int) -> bytes:
        return b""

    def piece(self, piece: Piece) -> bytes:
        texts = [delta.text for delta in piece.deltas if isinstance(delta, TextDelta)]
        return orjson.dumps({"more": "".join(texts)}) + b"\n"

    def end(self, outcomes: Sequence[Outcome]) -> bytes:
        return orjson.dumps({"why": outcomes[0].finish_reason}) + b"\n"

    def error(self, error: ProxyError) -> bytes:
        return orjson.dumps({"refused": error.message}) + b"\n"


class OperatorConfig(LauncherConfig):
    """A launcher whose agent is a coroutine that sends telegrams."""

    telegrams: int = 1

    def build(self, process: ProcessConfig = PROCESS) -> Launcher:
        return Operator(self)


class Operator:
    overhead_s = 1.0

    def __init__(self, config: OperatorConfig) -> None:
        self._config = config

    async def run(self, trial: Trial) -> AgentResult:
        headers = {"Authorization": f"Bearer {trial.api_key}"}
        url, answers = f"{trial.base_url}/telegrams", []
        async with aiohttp.ClientSession(headers=headers) as http:
            for number in range(self._config.telegrams):
                body = {"to": trial.model, "text": f"{trial.task.prompt} {number}"}
                async with http.post(url, json=body) as response:
                    answers.append((await response.json(content_type=None))["text"])
        return AgentResult(AgentEnd.EXITED, reward=float(len("".join(answers))))

    async def close(self) -> None:
        pass


class OdometerConfig(ExtraConfig):
    """An extra that counts how far each session went."""

    unit: Literal["tokens", "turns"]

    def build(self) -> Extra:
        return Odometer(self.unit)


class Odometer(Extra):
    def __init__(self, unit: str) -> None:
        self._unit = unit
        self._far: dict[str, int] = {}

    async def open(self, core: Core) -> None:
        self.core = core
        self._counter = core.metrics.counter("odometer", "How far all sessions went", "unit")

    @route("GET", "/odometer/{trial_id}", summary="How far the session went")
    async def _show(self, request: web.Request) -> web.Response:
        return json_answer({self._unit: self._far[request.match_info["trial_id"]]})

    def on_turn(self, session_id: str, turn: Turn, model: str) -> None:
        step = len(turn.sampled_ids) if self._unit == "tokens" else 1
        self._far[session_id] = self._far.get(session_id, 0) + step
        self._counter.labels(self._unit).inc(step)


Odometer.routes = routes_of(Odometer)


def imitating(
    logprobs: Tensor, prox: Tensor, advantages: Tensor, sequence: Tensor, *, slope: float
) -> Tensor:
    """A loss that raises the probability of every token, whatever its advantage."""
    return -slope * logprobs


async def test_dialect_answers_whole_and_in_a_stream(start_proxy: StartProxy) -> None:
    proxy = await start_proxy(dialects=[f"{HERE}:Telegrams"])
    proxy.answers("Arrived. Stop.")
    session = await proxy.session()
    whole = await proxy.post(session, "telegrams", {"to": "m", "text": "Well?"})
    assert whole == (200, {"text": "Arrived. Stop.", "why": "stop"})
    body = {"to": "m", "text": "Well?", "words": 500, "by_letter": True}
    (stream,) = await proxy.events(session, "telegrams", body)
    *pieces, end = map(orjson.loads, stream.splitlines())
    assert ("".join(piece["more"] for piece in pieces), end) == ("Arrived. Stop.", {"why": "stop"})
    status, said = await proxy.post(session, "telegrams", {"text": "Well?", "words": 0})
    assert status == 400
    assert "words" in said["refused"]
    _, turns = await proxy.record(session)
    assert [turn.dialect for turn in turns] == ["telegrams", "telegrams"]


async def test_launcher_runs_a_trial_whose_turns_the_extra_counts(
    start_proxy: StartProxy, tmp_path: Path
) -> None:
    proxy = await start_proxy(dialects=[f"{HERE}:Telegrams"], extras=[EXTRA])
    proxy.answers("Arrived.")
    agent = RemoteAgentConfig.model_validate(
        {"launcher": {"target": f"{HERE}:OperatorConfig", "settings": {"telegrams": 2}}}
    )
    loop = RemoteAgentLoop(
        *(proxy.control, agent.build_launcher(), agent.build_rewards(), tmp_path / "trials"),
        trial=agent,
    )
    rollout = await loop.run(Task("t", {"prompt": "Report."}), kind=SessionKind.TRAIN)
    assert (rollout.status, rollout.reward, rollout.num_turns) == ("done", 16.0, 2)
    sampled = sum(int(segment.mask.sum()) for segment in rollout.segments)
    assert sampled > 2
    key = {"Authorization": f"Bearer {ADMIN_KEY}"}
    async with proxy.http.get(f"{proxy.url}/odometer/{rollout.trial_id}", headers=key) as response:
        assert await response.json() == {"tokens": sampled}
    async with proxy.http.get(f"{proxy.url}/odometer/{rollout.trial_id}") as response:
        assert response.status == 401
    async with proxy.http.get(f"{proxy.url}/metrics", headers=key) as response:
        line = f'agentic_proxy_odometer_total{{unit="tokens"}} {sampled}.0'
        assert line in (await response.text()).splitlines()


def test_proxy_finds_a_part_in_its_working_folder(tmp_path: Path) -> None:
    (tmp_path / "own_part.py").write_text(OWN_PART)
    (tmp_path / "proxy.yaml").write_text("extras: [{target: 'own_part:OwnConfig'}]")
    done = subprocess.run(
        [Path(sys.executable).with_name("agentic-proxy"), "serve", "--config", "proxy.yaml"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (2, "agentic-proxy: no odometer here\n")


def test_loss_trains_a_step(tiny_model: Path) -> None:
    config = TrainerConfig.model_validate(
        {
            "model": {"path": tiny_model},
            "remote_agent": {"command": {"argv": ["true"]}},
            "optimizer": {"lr": 1e-2},
            "algorithm": {"loss": {"name": f"{HERE}:imitating", "slope": 2.0}, "groups": "all"},
            "trainer": {"device": "cpu"},
        }
    )
    learner = Learner(config, models_of_rank(config))
    batch = trained_batch([group(np.random.default_rng(0), "g")])

    weights = learner.algorithm.weigh(batch).weights

    def logprobs() -> Tensor:
        return learner.models.policy.compute_logprobs(batch, temperature=1.0).logprobs

    batch.logprobs = logprobs()  # as if this policy had sampled the batch
    learner.compute_logprobs(batch)
    learner.compute_advantages(batch)
    metrics = learner.update(batch)
    expected = -2.0 * float((weights * batch.logprobs).sum())
    assert metrics["actor/policy_loss"] == pytest.approx(expected, rel=1e-4)
    assert (weights * (logprobs() - batch.logprobs)).sum() > 0.1
