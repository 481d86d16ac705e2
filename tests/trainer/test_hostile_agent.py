"""An agent that looks for keys wherever it can, during a real run (on an engine of
`proxy.extras.engines`): it finds none, and nothing that it sends to the control plane takes
effect."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import pytest
import torch

from agent_loop.launchers.command import CommandConfig, CommandLauncher
from agent_loop.records import Task
from agent_loop.remote_agent_loop import RemoteAgentLoop
from agent_loop.rewards.verifier import Verifier, VerifierConfig
from agent_loop.trial.config import TrialConfig
from proxy import wall
from proxy.app import document_parts
from proxy.client import ProxyClient
from proxy.http.route import Who
from proxy.records import SessionKind
from proxy.testing.scripted_engine import ScriptedEngine
from tests.proxy.checkpoint import write_checkpoint
from trainer.cluster.proxy_server import ProxyProcess, ProxyServerConfig
from trainer.weight_sync.segment import SegmentWriter

REFUSED = wall.missing()
pytestmark = pytest.mark.skipif(
    REFUSED is not None, reason=f"this machine refuses namespaces: {REFUSED}"
)
THIEF = r"""
import contextlib, json, os, pathlib, re, urllib.error, urllib.request
routes, run, own = json.loads(os.environ["ROUTES"]), os.environ["RUN"], os.environ["OPENAI_API_KEY"]
texts, segments = [], []
for process in pathlib.Path("/proc").glob("[0-9]*"):
    for name in ("environ", "cmdline"):
        with contextlib.suppress(OSError):
            texts.append((process / name).read_bytes())
    with contextlib.suppress(OSError):
        segments += [str(fd) for fd in (process / "fd").iterdir() if "weights" in os.readlink(fd)]
segments += [str(path) for path in pathlib.Path("/dev/shm").iterdir() if "weights" in path.name]
for path in pathlib.Path(run).rglob("*"):
    if path.is_file():
        with contextlib.suppress(OSError):
            texts.append(path.read_bytes())
words = {w.decode() for text in texts for w in re.findall(rb"[A-Za-z0-9_.-]{20,}", text)}
is_secret = any(w.endswith(os.environ["NEEDLE_END"]) for w in words)
found = {"secret": is_secret, "segments": segments, "words": len(words), "accepted": []}
root = os.environ["OPENAI_BASE_URL"].rpartition("/v1")[0].rpartition("/")[0]

def call(method, path, body, headers):
    headers = {"Content-Type": "application/json", **headers}
    request = urllib.request.Request(root + path, body, headers, method=method)
    try:
        return urllib.request.urlopen(request, timeout=10).status
    except urllib.error.HTTPError as error:
        return error.code

for key in ["", "any", own, *sorted(words)[:20]]:
    bearer = {"Authorization": "Bearer " + key} if key else {}
    for method, path in routes:
        status = call(method, path, b"{}" if method != "GET" else None, bearer)
        if status != 401:
            found["accepted"].append([method, path, status])
chat = json.dumps({"model": "m", "messages": [{"role": "user", "content": "Hi"}]}).encode()
bearer = {"Authorization": "Bearer " + own}
found["other"] = call("POST", "/somebody-else/v1/chat/completions", chat, bearer)
path = os.environ["OPENAI_BASE_URL"].removeprefix(root) + "/chat/completions"
found["own"] = call("POST", path, chat, bearer)
pathlib.Path("found.json").write_text(json.dumps(found))
"""
NEEDLE = "a-secret-in-the-environment-of-the-run"


async def test_agent_finds_no_key_and_reaches_no_control_route(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGENTIC_PROXY_ADMIN_KEY", NEEDLE)
    run, weights = tmp_path / "run", SegmentWriter()
    run.mkdir()
    weights.write([("w", torch.ones(4))])
    async with ScriptedEngine(lambda prompt: [*prompt[-3:], 257]) as engine:
        settings = {
            "model": str(write_checkpoint(tmp_path / "model")),
            "store": f"sqlite:///{run}/sessions.db",
            "engines": [{"url": engine.url}],
        }
        server = ProxyProcess(ProxyServerConfig(), settings, run)
        await server.start()
        assert _holders(server.admin_key) == []
        async with ProxyClient(server.url, server.admin_key) as control:
            await control.create_session("somebody-else", kind=SessionKind.TRAIN)
            loop = RemoteAgentLoop(
                control,
                CommandLauncher(CommandConfig(argv=_thief(), env=_environment(run))),
                Verifier(VerifierConfig(argv=("true",))),
                run / "trials",
                trial=TrialConfig(keep_workspaces=True, max_retries=0, timeout_s=120),
                hidden=(run,),
            )
            rollout = await loop.run(Task("steal", {"prompt": "x"}), kind=SessionKind.TRAIN)
            await loop.close()
            assert rollout.error is None, (Path(rollout.logs or "") / "agent.log").read_text()
            _, turns = await control.get_turns("somebody-else")
        await server.stop()
    weights.close()
    found = json.loads((Path(rollout.logs or "") / "work" / "found.json").read_text())
    assert found.pop("words") < 500
    assert found == {"secret": False, "segments": [], "accepted": [], "other": 401, "own": 200}
    assert turns == []


def _thief() -> tuple[str, ...]:
    return (sys.executable, "-I", "-S", "-c", THIEF)


def _environment(run: Path) -> dict[str, str]:
    routes = [
        (route.method, re.sub(r"\{[^}]*\}", "somebody-else", route.path))
        for route in document_parts()[0].routes
        if route.who not in (Who.ANYONE, Who.WORKER)
    ]
    return {"RUN": str(run), "NEEDLE_END": NEEDLE[-8:], "ROUTES": json.dumps(routes)}


def _holders(secret: str) -> list[str]:
    """Processes of this machine whose environment or command line holds the secret."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        for name in ("environ", "cmdline"):
            try:
                text = (entry / name).read_bytes()
            except OSError:
                continue
            if secret.encode() in text and int(entry.name) != os.getpid():
                found.append(f"{entry.name}/{name}")
    return found
