"""Precedence, and that every error is one line with the key, its value and what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.config_sources import dump, load
from trainer.errors import ConfigError

MINIMAL: dict[str, Any] = {
    "model": {"path": "model"},
    "remote_agent": {"command": {"argv": ["true"]}},
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(MINIMAL | {"rollout": {"group_size": 3, "concurrency": 7}}))
    return path


def error_of(path: Path | None, *overrides: str, **environment: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(path, overrides, environment)
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_file_wins_over_default(file: Path) -> None:
    assert load(file).rollout.group_size == 3


def test_environment_wins_over_file(file: Path) -> None:
    config = load(file, [], {"AGENTIC_TRAIN__ROLLOUT__GROUP_SIZE": "4"})
    assert config.rollout.group_size == 4
    assert config.rollout.concurrency == 7


def test_command_line_wins_over_environment(file: Path) -> None:
    environment = {"AGENTIC_TRAIN__ROLLOUT__GROUP_SIZE": "4"}
    assert load(file, ["rollout.group_size=5"], environment).rollout.group_size == 5


@settings(max_examples=60, deadline=None)
@given(
    values=st.lists(st.one_of(st.none(), st.integers(1, 99)), min_size=3, max_size=3),
)
def test_the_nearest_source_that_says_something_wins(
    tmp_path_factory: pytest.TempPathFactory, values: list[int | None]
) -> None:
    in_file, in_environment, on_command_line = values
    path = tmp_path_factory.mktemp("config") / "c.yaml"
    rollout = {} if in_file is None else {"group_size": in_file}
    path.write_text(yaml.safe_dump(MINIMAL | {"rollout": rollout}))
    environment = (
        {}
        if in_environment is None
        else {"AGENTIC_TRAIN__ROLLOUT__GROUP_SIZE": str(in_environment)}
    )
    overrides = [] if on_command_line is None else [f"rollout.group_size={on_command_line}"]
    said = [v for v in (on_command_line, in_environment, in_file) if v is not None]
    assert load(path, overrides, environment).rollout.group_size == (said[0] if said else 8)


def test_verl_names_are_understood_and_lose_to_the_command_line(file: Path) -> None:
    environment = {"LLM_PROXY_IP": "10.0.0.7", "PROXY_SERVER_URL": "http://10.0.0.8:1"}
    words = ["proxy_server.url=http://10.0.0.9:2", "engine.urls=[http://10.0.0.9:3]"]
    config = load(file, words, environment)
    assert config.proxy_server.llm_proxy_ip == "10.0.0.7"
    assert config.proxy_server.url == "http://10.0.0.9:2"


def test_a_proxy_that_runs_already_wants_its_engines_named(file: Path) -> None:
    text = error_of(file, "proxy_server.url=http://10.0.0.9:2")
    assert "proxy_server.url=http://10.0.0.9:2" in text
    assert "engine.urls" in text


def test_unrelated_environment_is_ignored(file: Path) -> None:
    assert load(file, [], {"HOME": "/", "AGENTIC_TRAINER": "x"}) == load(file)


def test_values_are_yaml(file: Path) -> None:
    config = load(file, ["optimizer.lr=1e-5", "data.train_files=[a.jsonl, b.jsonl]"])
    assert config.optimizer.lr == 1e-5
    assert [str(path) for path in config.data.train_files] == ["a.jsonl", "b.jsonl"]


def test_what_is_printed_reads_back_equal(file: Path, tmp_path: Path) -> None:
    config = load(file, ["rollout.temperature=0.7", "data.weights={a: 2}"])
    again = tmp_path / "again.yaml"
    again.write_text(dump(config))
    assert load(again) == config


def test_unknown_key_names_the_nearest(file: Path) -> None:
    text = error_of(file, "rollout.group_sizes=4")
    assert "rollout.group_sizes=4" in text
    assert "the command line" in text
    assert "did you mean rollout.group_size?" in text


def test_unknown_key_in_the_file_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(yaml.safe_dump(MINIMAL | {"trainner": {"steps": 3}}))
    text = error_of(path)
    assert "trainner" in text
    assert str(path) in text


def test_missing_key_says_where_to_set_it(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(yaml.safe_dump({"remote_agent": MINIMAL["remote_agent"]}))
    assert "model: missing" in error_of(path)


def test_out_of_range_names_value_and_bound(file: Path) -> None:
    text = error_of(file, "rollout.group_size=0")
    assert "rollout.group_size=0" in text
    assert "greater than or equal to 1" in text


def test_environment_value_that_is_out_of_range_names_the_environment(file: Path) -> None:
    text = error_of(file, AGENTIC_TRAIN__ROLLOUT__TEMPERATURE="-1")
    assert "rollout.temperature=-1" in text
    assert "the environment" in text


def test_broken_value_names_the_variable(file: Path) -> None:
    text = error_of(file, AGENTIC_TRAIN__PROXY_SERVER__TEMPLATE_KWARGS="{a: ")
    assert "AGENTIC_TRAIN__PROXY_SERVER__TEMPLATE_KWARGS" in text


def test_no_agent_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(yaml.safe_dump({"model": {"path": "m"}, "remote_agent": {}}))
    assert "remote_agent.command.argv" in error_of(path)


def test_a_bent_distribution_is_refused(file: Path) -> None:
    assert "rollout.top_p=0.9" in error_of(file, "rollout.top_p=0.9")


@pytest.mark.parametrize("content", ["[1, 2]", "a: [", "just text"])
def test_a_file_that_is_no_mapping_names_the_file(tmp_path: Path, content: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(content)
    assert str(path) in error_of(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    assert "nothing.yaml" in error_of(tmp_path / "nothing.yaml")


def test_an_argument_that_is_no_override_is_named(file: Path) -> None:
    assert "'rollout.group_size'" in error_of(file, "rollout.group_size")


def test_harbor_by_the_names_of_verls_recipe(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        yaml.safe_dump(
            {
                "model": {"path": "m"},
                "data": {"train_harbor_dir": "tasks/train"},
                "remote_agent": {"agent_name": "terminus-2"},
            }
        )
    )
    environment = {
        "HARBOR_SERVER_URL": "http://h:8090",
        "HARBOR_DATASET_DIRS": "a:b",
        "REMOTE_AGENT_KWARGS": '{"max_turns": 3}',
        "REMOTE_AGENT_NAME": "codex",
    }
    config = load(path, ["remote_agent.agent_name=mini-swe-agent"], environment)
    assert config.remote_agent.agent_name == "mini-swe-agent"
    assert config.remote_agent.harbor_server_url == "http://h:8090"
    assert config.remote_agent.agent_kwargs == {"max_turns": 3}
    assert config.data.harbor_roots == (Path("tasks/train"), Path("a"), Path("b"))


def test_a_command_and_an_agent_of_harbor_are_two_agents(tmp_path: Path) -> None:
    agent = {"command": {"argv": ["true"]}, "agent_name": "codex"}
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump({"model": {"path": "m"}, "remote_agent": agent}))
    assert "several agents: remote_agent.command, remote_agent.agent_name" in error_of(path)
