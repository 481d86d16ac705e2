"""The commands of docs/learn.md, as they stand there: a recorder that answers by HTTP, its engine,
and the commands of both programs, in one process."""

from __future__ import annotations

import asyncio
import json
import shlex
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest
import yaml

import proxy.cli
from proxy.config import RenderingConfig, load_config
from proxy.extras.learn.section import with_learners
from proxy.rendering.rendering import Rendering
from proxy.rendering.tokenizer import load_tokenizer
from tests.pages import ROOT, blocks_of
from tests.proxy.conftest import ADMIN_KEY, RunningProxy, starting_proxies
from tests.trainer.fake_engine import FakeEngine, fake_engine
from trainer.commands.arguments import COMMANDS
from trainer.extras.learn import command

PAGE = ROOT / "docs" / "learn.md"


def lines_of(page: Path, program: str) -> list[str]:
    """The page's lines that run this program, without their comments."""
    lines = [line for block in blocks_of(page) for line in block.text.splitlines()]
    return [line.partition("#")[0].strip() for line in lines if line.startswith(program)]


class Person:
    """Who follows the page in a folder, with one recorder."""

    def __init__(self, proxy: RunningProxy, loaded: FakeEngine, folder: Path, file: Path) -> None:
        """`loaded`: the engine as the learner knows it, with the adapters that it has loaded."""
        self.proxy = proxy
        self.loaded = loaded
        self.folder = folder
        self.file = file

    async def agentic_proxy(self, *words: str) -> None:
        more = ["--url", self.proxy.url]
        assert await asyncio.to_thread(proxy.cli.main, [*words, *more]) == 0

    async def agentic_train(self, *words: str) -> None:
        """A command with a configuration named `learn.yaml`."""
        named = [str(self.file) if word == "learn.yaml" else word for word in words]
        assert named[0] == "learn"
        arguments = COMMANDS["learn"].parser("learn").parse_args(named[1:])
        assert await command._run(arguments) == 0

    async def session(self, name: str, good: bool, **metadata: str) -> None:
        self.proxy.answers("good" if good else "bad")
        engine = self.proxy.engine
        engine.adapters = dict.fromkeys(self.loaded.adapters, engine.script)
        made = await self.proxy.control.create_session(name, metadata={"learn": "yes", **metadata})
        body = {"messages": [{"role": "user", "content": "Do it."}]}
        assert (await self.proxy.post(made, "chat/completions", body))[0] == 200
        await self.proxy.control.complete(name)
        await self.proxy.control.curate(name, value=float(good))

    async def week(self, name: str, **metadata: str) -> None:
        for number in range(4):
            await self.session(f"{name}-{number}", number % 2 == 0, **metadata)
        await self.agentic_train("learn", "--config", "learn.yaml", "--once")

    async def decided(self) -> list[tuple[str, int | None, str]]:
        """What the page shows of each decision, the oldest first: kind, adapter, by whom."""
        url, headers = f"{self.proxy.url}/view/decisions", {"Authorization": f"Bearer {ADMIN_KEY}"}
        async with self.proxy.http.get(url, params={"policy": "work"}, headers=headers) as answer:
            found = (await answer.json())["decisions"]
        return [(each["kind"], each["adapter"], each["by"]) for each in reversed(found)]

    async def left(self) -> set[str]:
        return {each["trial_id"] for each in await self.proxy.control.list_sessions()}


@pytest.fixture
async def person(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Person]:
    monkeypatch.setenv("AGENTIC_PROXY_ADMIN_KEY", ADMIN_KEY)
    no_ids = np.zeros(0, np.int32)  # the engine has no model that the trainer's is compared with
    monkeypatch.setattr(command, "probe_ids", lambda *_: no_ids)
    (shown,) = (block for block in blocks_of(PAGE) if block.title == "learn.yaml")
    rendering = Rendering(load_tokenizer(tiny_model), RenderingConfig())
    with fake_engine() as (loaded, engine):
        values = yaml.safe_load(shown.text)
        values["recorder"]["folder"] = str(tmp_path / "work")
        values["model"]["path"] = str(tiny_model)
        values |= {"engines": [engine], "device": "cpu"}
        values |= {"update": {"sessions": 4, "held_out": 0.0, "epochs": 2}}
        values |= {"gates": {"max_mismatch": 100.0, "max_kl": 100.0}}
        file = tmp_path / "learn.yaml"
        file.write_text(yaml.safe_dump(values), encoding="utf-8")
        extras = with_learners(load_config(None, model=tiny_model), [file], start=False).extras
        async with starting_proxies(tiny_model, rendering, tmp_path) as start:
            proxy = await start(extras=[each.model_dump() for each in extras])
            file.write_text(yaml.safe_dump(values | {"url": proxy.url}), encoding="utf-8")
            yield Person(proxy, loaded, tmp_path, file)


async def test_commands_of_the_page(person: Person, capsys: pytest.CaptureFixture[str]) -> None:
    def said() -> str:
        return capsys.readouterr().out.strip()

    (policy,) = lines_of(PAGE, "agentic-proxy policy")
    assert policy == "agentic-proxy policy show"
    show = shlex.split(policy)[1:]
    await person.week("first", folder=str(person.folder / "shop"))
    await person.agentic_proxy(*show)
    assert said().startswith("work: stable 0, canary 1 for 50 % of new sessions")
    await person.agentic_proxy("policy", "promote")
    assert "promote ordered; the learner does the rest" in said()
    await person.agentic_train("learn", "--config", "learn.yaml", "--once")
    await person.agentic_proxy(*show)
    assert said() == "work: stable 1, no canary"
    await person.agentic_proxy("policy", "freeze")
    await person.week("second")
    await person.agentic_proxy(*show)
    assert said().endswith("work: stable 1, no canary; frozen")
    await person.agentic_proxy("policy", "thaw")
    await person.agentic_train("learn", "--config", "learn.yaml", "--once")
    await person.agentic_proxy("policy", "rollback")
    assert "canary 2" in said()
    await person.agentic_train("learn", "--config", "learn.yaml", "--once")
    await person.agentic_proxy(*show)
    assert said() == "work: stable 1, no canary"

    of_one = [("update", ""), ("gate", ""), ("canary", "")]
    assert await person.decided() == [
        *((kind, 1, by) for kind, by in [*of_one, ("order", "person"), ("promote", "person")]),
        *((kind, None, "person") for kind in ("freeze", "thaw")),
        *((kind, 2, by) for kind, by in [*of_one, ("order", "person"), ("rollback", "person")]),
    ]

    forget, prove = lines_of(PAGE, "agentic-train learn")
    whole = PAGE.read_text(encoding="utf-8")
    assert "--day 2026-11-28" in whole
    assert "--repository ~/code/shop" in whole
    await person.agentic_train(*shlex.split(prove)[1:])
    assert said().startswith("adapter 1: equal")
    one = [word.replace("SESSION", "first-1") for word in shlex.split(forget)[1:]]
    await person.agentic_train(*one)
    assert said().splitlines() == [
        "1 sessions are forgotten",
        "adapter 1 had learned from them; adapter 3 is in its place",
        "adapters 2 are deleted",
    ]
    assert "first-1" not in await person.left()
    await person.agentic_train(*shlex.split(prove)[1:])
    assert said().startswith("adapter 3: equal")
    without = one[: one.index("--forget")]
    await person.agentic_train(*without, "--repository", str(person.folder / "shop"))
    assert said().startswith("3 sessions are forgotten")
    assert await person.left() == {f"second-{number}" for number in range(4)}
    today = datetime.now(UTC).astimezone().date().isoformat()
    await person.agentic_train(*without, "--day", today)
    assert said().startswith("4 sessions are forgotten")
    assert not await person.left()
    await person.agentic_train(*shlex.split(prove)[1:])
    assert said() == "no adapter is stable but the base"
    journal = (person.folder / "work" / "journal.jsonl").read_text(encoding="utf-8")
    kinds = [json.loads(line)["kind"] for line in journal.splitlines()]
    assert kinds.count("forgot") == 3
    assert "first" not in journal
    assert "second" not in journal
