"""The table "In a company's network" of docs/deployment.md: what machines of companies have.

A scripted engine takes the place of vLLM.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from agent_loop.extras.swarm.serve import _locked
from harbor_sdk.server.serve import serve
from proxy.errors import ConfigurationError
from proxy.store import open_store
from tests.company_network import DEAD, PROXY_NAMES
from tests.proxy.checkpoint import write_checkpoint
from trainer.errors import ConfigError
from trainer.run.folder import RunFolder

ROOT = Path(__file__).parent.parent
AGENT = """
import os, pathlib, openai
client = openai.OpenAI()
answer = client.chat.completions.create(model="m", messages=[{"role": "user", "content": "Hi."}])
pathlib.Path("made.txt").write_text(answer.choices[0].finish_reason)
"""
BEHIND_A_DEAD_PROXY = "; ".join(f"export {name}={DEAD}" for name in PROXY_NAMES)
READ_ONLY_HOME = "mount --bind home home && mount -o remount,bind,ro home && export HOME=$PWD/home"
SMALL_SHM = "mount -t tmpfs -o size=64k shm /dev/shm"
ONLY_IPV6 = (
    "ip link set lo up && ip -4 addr flush dev lo && "
    "export HOST=::1 AGENTIC_PROXY_HOST=::1 && ! ping -c 1 -W 1 127.0.0.1 2>/dev/null"
)
MACHINES = {
    "a proxy": ([], BEHIND_A_DEAD_PROXY),
    "umask": ([], "umask 077"),
    "a read-only home": (["--mount"], READ_ONLY_HOME),
    "a small /dev/shm": (["--mount"], SMALL_SHM),
    "IPv6 only": (["--net"], ONLY_IPV6),
    "a proxy and IPv6 only": (["--net"], f"{ONLY_IPV6} && {BEHIND_A_DEAD_PROXY}"),
}
SESSION = """
{python} -m proxy.testing.scripted_engine --host ${{HOST:-127.0.0.1}} --answer-tokens 3 \\
    > engine.url &
engine=$!
until [ -s engine.url ]; do sleep 0.1; done
{python} -m proxy run --model {model} --engine "$(cat engine.url)" -- {python} agent.py
code=$?
kill $engine
exit $code
"""


@pytest.mark.parametrize("name", MACHINES)
def test_an_agent_is_recorded_on_a_machine_with(name: str, tmp_path: Path) -> None:
    namespaces, conditions = MACHINES[name]
    if namespaces and os.geteuid() != 0:
        pytest.skip("needs root, for a namespace")
    folder = tmp_path / "my clone ä 日本"
    (folder / "home").mkdir(parents=True)
    (folder / "agent.py").write_text(AGENT)
    model = write_checkpoint(folder / "the model")
    session = SESSION.format(python=shlex.quote(sys.executable), model=shlex.quote(str(model)))
    script = f"set -e\n{conditions}\nset +e\n{session}"
    inside = (
        ["unshare", *namespaces, "bash", "-c", script] if namespaces else ["bash", "-c", script]
    )
    environment = {name: value for name, value in os.environ.items() if name not in PROXY_NAMES}
    done = subprocess.run(
        [*inside, "bash", "-c", script],
        cwd=folder,
        env={**environment, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (folder / "made.txt").read_text() in ("stop", "length")
    assert "1 turns" in done.stderr


@pytest.mark.long
@pytest.mark.engine
def test_a_run_trains_on_a_machine_with_only_ipv6(tmp_path: Path) -> None:
    """With a real vLLM, whose workers meet by gloo."""
    if os.geteuid() != 0:
        pytest.skip("needs root, for a namespace")
    run, program = tmp_path / "run", Path(sys.executable).with_name("agentic-train")
    few = "rollout.groups_per_step=1 rollout.group_size=4 trainer.steps=1 data.val_files=[]"
    script = (
        f"set -e\nip link set lo up\nip -4 addr flush dev lo\n"
        f"{program} --config agentic_trainer.yaml proxy_server.host=::1 trainer.run_dir={run} {few}"
    )
    inside = ["unshare", "--net", "bash", "-c", script]
    done = subprocess.run(inside, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["step"] == 1


def no_locks(*_: object) -> NoReturn:
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))


async def test_a_file_system_without_locks_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunFolder.create(tmp_path / "run")
    monkeypatch.setattr(fcntl, "flock", no_locks)
    with pytest.raises(ConfigError, match=r"gives no lock .No locks available.*trainer.run_dir"):
        run.lock()
    with pytest.raises(ConfigurationError, match=r"No locks available; .* local disk, or Postgre"):
        await open_store(f"sqlite:///{tmp_path}/proxy.db")


def test_a_swarm_server_names_a_file_system_without_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fcntl, "flock", no_locks)
    with pytest.raises(ConfigurationError, match=r"--state-dir .*gives no lock"), _locked(tmp_path):
        pass


def test_a_harbor_server_names_a_file_system_without_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In one line, before it opens its table of runs."""
    harbor: Any = SimpleNamespace(run_trial=None)
    monkeypatch.setitem(sys.modules, "harbor_sdk.trial", harbor)
    monkeypatch.setattr("harbor_sdk.server.serve.hide_memory", lambda: None)
    monkeypatch.setattr(fcntl, "flock", no_locks)
    assert serve({"state_dir": str(tmp_path), "tasks": [str(tmp_path)]}) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(rf"{tmp_path} gives no lock \(No locks available\).*--state-dir", line)
    assert not (tmp_path / "runs.sqlite").exists()
