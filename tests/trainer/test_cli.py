"""Bad input ends in one line that names the key or file, exit code not 0, nothing started."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest
import yaml

from trainer.cli import main


@pytest.fixture
def config(tiny_model: Path, tmp_path: Path) -> Path:
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text(json.dumps({"task_id": "a", "prompt": "say a"}) + "\n")
    path = tmp_path / "config.yaml"
    settings = {
        "model": {"path": str(tiny_model)},
        "data": {"train_files": [str(tasks)]},
        "remote_agent": {"command": {"argv": ["true"]}},
        "trainer": {"run_dir": str(tmp_path / "runs" / "a"), "device": "cpu"},
    }
    path.write_text(yaml.safe_dump(settings))
    return path


def failure(capfd: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str]:
    code = main(argv)
    text = capfd.readouterr().err.strip()
    assert code != 0
    assert text.startswith("agentic-train: ")
    assert "\n" not in text
    return code, text


def test_check_prints_the_resolved_configuration(
    config: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["--config", str(config), "--check", "rollout.group_size=3"]) == 0
    printed = yaml.safe_load(capfd.readouterr().out)
    assert printed["rollout"]["group_size"] == 3
    assert printed["optimizer"]["lr"]
    assert not (config.parent / "runs").exists()


def test_unknown_key(config: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code, text = failure(capfd, "--config", str(config), "rollout.size=3")
    assert code == 2
    assert "rollout.size=3" in text


def test_missing_config(capfd: pytest.CaptureFixture[str]) -> None:
    code, text = failure(capfd, "rollout.group_size=3")
    assert code == 2
    assert "--config: missing" in text


def test_unknown_command(capfd: pytest.CaptureFixture[str]) -> None:
    assert "'trian'" in failure(capfd, "trian")[1]


def test_model_path_that_is_no_checkpoint(
    config: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code, text = failure(capfd, "--config", str(config), f"model.path={tmp_path}")
    assert code == 2
    assert "model.path" in text
    assert str(tmp_path) in text


def test_task_file_with_a_broken_line(
    config: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    tasks = tmp_path / "broken.jsonl"
    tasks.write_text('{"task_id": "a"}\n{"task_id": \n')
    code, text = failure(capfd, "--config", str(config), f"data.train_files=[{tasks}]")
    assert code == 2
    assert f"{tasks}:2" in text


def test_task_file_that_is_missing(config: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert (
        "none.jsonl" in failure(capfd, "--config", str(config), "data.train_files=[none.jsonl]")[1]
    )


def test_no_task_file(config: Path, capfd: pytest.CaptureFixture[str]) -> None:
    text = failure(capfd, "--config", str(config), "data.train_files=[]")[1]
    assert "data.train_files: missing" in text


def test_held_out_tasks_that_are_trained_on(
    config: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    tasks = config.parent / "tasks.jsonl"
    text = failure(capfd, "--config", str(config), f"data.val_files=[{tasks}]")[1]
    assert "data.val_files" in text


def test_agent_command_that_does_not_exist(config: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code, text = failure(
        capfd, "--config", str(config), "remote_agent.command.argv=[no-such-program]"
    )
    assert code == 2
    assert "'no-such-program'" in text


def test_report_of_what_is_no_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code, text = failure(capfd, "report", str(tmp_path))
    assert code == 2
    assert str(tmp_path) in text


def test_a_weight_of_a_reward_that_is_not_there(
    config: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    text = failure(capfd, "--config", str(config), "remote_agent.reward_weights={judge: 1}")[1]
    assert "remote_agent.reward_weights" in text


def test_several_reward_sources_are_one(config: Path) -> None:
    rewards = "remote_agent.verifier={argv: ['true']}", "remote_agent.posted_rewards=true"
    weights = "remote_agent.reward_weights={posted: 0.5}"
    assert main(["--config", str(config), "--check", *rewards, weights]) == 0


def test_a_port_in_use(config: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code = main(["--config", str(config), f"proxy_server.port={port}"])
    assert code == 2
    line = capfd.readouterr().err.strip().splitlines()[-1]
    assert f"proxy_server.port={port}" in line
