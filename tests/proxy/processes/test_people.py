"""Two people at a real `agentic-proxy serve`: each exports, replays and rewinds own sessions, by
commands that have nothing but the address and the person's key."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import pytest
import yaml

from proxy.client import ProxyClient
from proxy.rendering.rendering import Rendering
from proxy.testing.scripted_engine import ScriptedEngine
from tests.proxy.conftest import ADMIN_KEY

pytestmark = pytest.mark.slow

SECRET = "mauve-otter"
AGENT = f"""
import json, os, urllib.request

messages = [{{"role": "user", "content": "The word is {SECRET}."}}]
for _ in range(2):
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({{"model": "m", "messages": messages}}).encode(),
        {{"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"],
         "Content-Type": "application/json"}},
    )
    answer = json.load(urllib.request.urlopen(request))["choices"][0]["message"]
    messages += [answer, {{"role": "user", "content": "Go on."}}]
"""
RUN = ("--sandbox", "off", "--", sys.executable, "-c", AGENT)


@dataclass
class Office:
    """A recorder with two people, each on a machine of their own."""

    url: str
    folder: Path
    engine: ScriptedEngine

    async def does(self, name: str, *words: str, code: int = 0) -> str:
        """What a person's command prints."""
        home = self.folder / f"home of {name}"
        home.mkdir(exist_ok=True)
        known = {k: v for k, v in os.environ.items() if not k.startswith("AGENTIC_PROXY_")}
        own = {"HOME": str(home), "XDG_STATE_HOME": str(home / "state")}
        key = {"AGENTIC_PROXY_ADMIN_KEY_FILE": str(self.folder / f"{name}.key")}
        more = {"PYTHONPATH": os.getcwd(), "COLUMNS": "300"}
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "proxy", *words[:1], "--url", self.url, *words[1:]),
            cwd=home,
            env={**known, **own, **key, **more},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        said = (await process.communicate())[0].decode()
        assert process.returncode == code, said
        return said

    def rows(self, name: str) -> list[dict[str, Any]]:
        file = self.folder / f"home of {name}" / "out.jsonl"
        return [orjson.loads(line) for line in file.read_bytes().splitlines()]


@pytest.fixture
async def office(checkpoint: Path, rendering: Rendering, tmp_path: Path) -> AsyncIterator[Office]:
    end = rendering.tokenizer.convert_tokens_to_ids("<|im_end|>")
    said = [*rendering.tokenizer.encode("Done."), end]
    async with ScriptedEngine(lambda _: said) as engine:
        file = tmp_path / "proxy.yaml"
        values = {
            "model": str(checkpoint),
            "engines": [{"url": engine.url}],
            "store": f"sqlite:///{tmp_path}/record.db",
            "people": {name: str(tmp_path / f"{name}.key") for name in ("ann", "bob")},
        }
        file.write_text(yaml.safe_dump(values))
        argv = [sys.executable, "-m", "proxy", "serve", "--port", "0", "--config", str(file)]
        environment = {**os.environ, "AGENTIC_PROXY_ADMIN_KEY": ADMIN_KEY}
        environment["PYTHONPATH"] = os.getcwd()
        process = await asyncio.create_subprocess_exec(
            *argv, env=environment, stdout=asyncio.subprocess.PIPE
        )
        try:
            assert process.stdout is not None
            found = re.search(r"http://[\d.]+:\d+", (await process.stdout.readline()).decode())
            assert found is not None
            yield Office(found[0], tmp_path, engine)
        finally:
            process.send_signal(signal.SIGTERM)
            assert await process.wait() == 0


async def test_a_person_exports_replays_and_rewinds_own_sessions_alone(office: Office) -> None:
    printed = await office.does("ann", "run", "--session", "ann/one", *RUN)
    (export,) = [line.split() for line in printed.splitlines() if "agentic-proxy export" in line]
    assert office.url in export
    await office.does("bob", "run", "--session", "bob/one", *RUN)
    out = ("--format", "messages", "--out", "out.jsonl")

    assert "1 rows in out.jsonl" in await office.does("ann", "export", "ann/one", *out)
    assert SECRET in str(office.rows("ann"))
    replayed = ("--engine", office.engine.url)
    assert "2 of 2 turns compared" in await office.does("ann", "replay", "ann/one", *replayed)
    again = ("ann/one", "--turn", "1", "-n", "2", *RUN)
    table = await office.does("ann", "rewind", *again)
    names = re.findall(r"^(ann/one\.1\.\w+)  0 +1 \+ 1 ", table, re.MULTILINE)
    assert len(names) == 2, table

    async with ProxyClient(office.url, ADMIN_KEY) as admin:
        for name in names:
            shown = await admin.show(name)
            assert shown["metadata"]["person"] == "ann"
            assert shown["from"]["session"] == "ann/one"
    assert "1 of 2 turns compared" in await office.does("ann", "replay", names[0], *replayed)
    assert "3 rows in out.jsonl" in await office.does("ann", "export", *out)
    deeper = await office.does("ann", "rewind", names[0], "--turn", "1", *RUN)
    assert f"{names[0]}.1." in deeper

    for theirs in ("ann/one", names[0]):
        for words in (
            ("export", theirs, *out),
            ("replay", theirs, *replayed),
            ("rewind", theirs, "--turn", "1", *RUN),
            ("run", "--from", theirs, "--turn", "1", *RUN),
            ("run", "--session", f"{theirs}.1.mine", *RUN),
        ):
            said = await office.does("bob", *words, code=2)
            assert "404" in said or "is not in this store" in said, said
            assert SECRET not in said
    assert "1 rows in out.jsonl" in await office.does("bob", "export", *out)
    assert "bob/one" in str(office.rows("bob"))
    assert "ann" not in str(office.rows("bob"))
    assert "0 rows" in await office.does("bob", "export", "--prefix", "ann/", *out)
