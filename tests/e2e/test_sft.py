"""`agentic-train sft` as a process: its run folder, its checkpoints, and a run that is killed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from proxy.client import ProxyClient
from proxy.records import Reward
from proxy.run_files.files import read_jsonl
from proxy.settings.state_folder import default_store
from tests.company_network import PrivateAuthority
from tests.proxy.commands.test_upstream import ASKS, serving, streamed
from tests.proxy.hosted_model import HostedModel
from tests.trainer.extras.sft.recorded import write_sessions
from trainer.cli import main
from trainer.policy.model_config import ModelConfig
from trainer.policy.policy import Policy
from trainer.run.folder import RunFolder

STEPS = 8


@pytest.fixture(scope="module")
def sessions(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("collected")
    asyncio.run(write_sessions(folder / "sessions.db", tiny_model, 12))
    return folder


def configuration(folder: Path, model: Path, sessions: Path, name: str) -> Path:
    """Two epochs of four steps, with a learning rate that depends on the number of steps."""
    settings = {
        "model": {"path": str(model)},
        "sft": {
            "sessions": [str(sessions)],
            "epochs": 2,
            "batch_sessions": 3,
            "held_out": 0.1,
            "held_out_every": 4,
        },
        "optimizer": {"lr": 1e-3, "schedule": "linear"},
        "trainer": {"run_dir": str(folder / name), "device": "cpu", "save_every": 3},
        "logging": {"progress": "plain"},
    }
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


def run(*words: str, killed_at: tuple[str, int] | None = None) -> subprocess.CompletedProcess[str]:
    program = ["trainer.cli"]
    if killed_at is not None:
        program = ["tests.e2e.killed_train", killed_at[0], str(killed_at[1])]
    return subprocess.run(
        [sys.executable, "-m", *program, *words],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


def metrics(folder: Path, name: str) -> list[dict[str, Any]]:
    kept = ("step", "sft/loss", "sft/held_out_loss", "sft/lr", "sft/trained_tokens", "sft/epoch")
    lines = read_jsonl(RunFolder.open(folder / name).metrics)
    return [{key: line[key] for key in kept if key in line} for line in lines]


@pytest.mark.long
def test_killed_run_continues_with_the_same_batches_to_the_same_weights(
    tiny_model: Path, sessions: Path, tmp_path: Path
) -> None:
    whole, killed = (
        configuration(tmp_path, tiny_model, sessions, name) for name in ("whole", "killed")
    )
    done = run("sft", "--config", str(whole))
    assert done.returncode == 0, done.stderr
    dead = run(
        "sft", "--config", str(killed), killed_at=("trainer.extras.sft.fit:ImitateBatch.on", 6)
    )
    assert dead.returncode == -signal.SIGKILL
    assert [line["step"] for line in metrics(tmp_path, "killed")] == [1, 2, 3, 4, 5]
    again = run("sft", "--config", str(killed))  # the same command continues
    assert again.returncode == 0, again.stderr
    assert "checkpoints/step-000003" in again.stdout

    lines = metrics(tmp_path, "whole")
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert [line["step"] for line in lines if "sft/held_out_loss" in line] == [4, 8]
    assert lines[-1]["sft/held_out_loss"] < lines[3]["sft/held_out_loss"]
    assert metrics(tmp_path, "killed") == lines
    weights, same = (
        load_file(tmp_path / name / "checkpoints" / "step-000008" / "model" / "model.safetensors")
        for name in ("whole", "killed")
    )
    before = load_file(tiny_model / "model.safetensors")
    assert weights.keys() == before.keys()
    for name, weight in weights.items():
        assert torch.equal(weight, same[name]), name
        assert not torch.equal(weight, before[name]), name

    summary = RunFolder.open(tmp_path / "killed").read_summary()
    assert (summary["status"], summary["steps"]) == ("done", STEPS)
    report = (tmp_path / "killed" / "report.html").read_text()
    assert "was trained by imitation of answers recorded in" in report
    assert '"sft/loss":[[1,' in report
    Policy(ModelConfig(path=tmp_path / "whole" / "checkpoints" / "step-000008" / "model"))


async def test_model_learns_from_the_recorded_text_of_a_hosted_model(
    tiny_model: Path, tmp_path: Path
) -> None:
    """`agentic-proxy serve --upstream`, then `agentic-train sft` on what it has recorded."""
    hosted, (route, body) = HostedModel(), ASKS["chat"]
    shell = {"name": "shell", "arguments": json.dumps({"command": "ls -l"})}
    call = {"id": "a", "type": "function", "function": shell}
    answer = {"content": "I look.", "tool_calls": [call]}
    async with serving(tmp_path, PrivateAuthority(tmp_path), hosted) as url:
        for number in range(4):
            hosted.says = [(answer, "tool_calls")]
            await streamed(f"{url}/trial-{number}", route, body)
        key = Path(f"{default_store()}.admin-key").read_text().strip()
        async with ProxyClient(url, key) as control:
            for number in range(4):
                await control.add_reward(f"trial-{number}", Reward("mine", 1.0))
    config = configuration(tmp_path, tiny_model, default_store(), "taught")
    words = (
        "sft.kind=eval",
        "sft.epochs=4",
        "sft.batch_sessions=2",
        "sft.held_out=0",
        "optimizer.lr=1e-2",
    )
    done = await asyncio.to_thread(run, "sft", "--config", str(config), *words)
    assert done.returncode == 0, done.stderr
    lines = metrics(tmp_path, "taught")
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert lines[-1]["sft/loss"] < 0.8 * lines[0]["sft/loss"]
    assert RunFolder.open(tmp_path / "taught").read_summary()["status"] == "done"


def test_missing_sessions_are_one_line_of_error(
    tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sft", f"model.path={tiny_model}"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("agentic-train sft: sft.sessions: missing; set it in the YAML file")
    assert main(["sft", f"model.path={tiny_model}", "sft.sessions=[/nowhere]"]) == 2
    said = capsys.readouterr().err
    assert len(said.splitlines()) == 1
    assert "/nowhere" in said
