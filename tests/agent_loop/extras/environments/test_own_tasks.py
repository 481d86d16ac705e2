"""Tasks of environments: where `data` names none, and what a `verifiers` environment lists.

Real environments are in tests/e2e/test_verifiers.py and test_openenv.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agent_loop.errors import TaskFileError
from agent_loop.extras.environments.openenv_agent import ActionError, action_of
from agent_loop.extras.environments.verifiers import VerifiersConfig
from agent_loop.launchers.agent_process import ProgramConfig
from agent_loop.remote_agent_config import RemoteAgentConfig
from agent_loop.tasks import DataConfig, held_out_tasks, training_tasks, with_own_tasks
from proxy.errors import ConfigurationError


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """A program in place of a Python with `verifiers`: it lists as many tasks as it is asked for,
    at most 5, and its own arguments."""
    rows = [{"task_id": f"t{n}", "prompt": f"{n}?", "verifiers": {"idx": n}} for n in range(5)]
    lines = "\n".join(map(json.dumps, rows))
    program = tmp_path / "bin/python"
    program.parent.mkdir()
    program.write_text(
        f"#!/bin/sh\nprintf '%s' \"$3\" > {tmp_path}/settings\n"
        f'echo "$PYTHONPATH" > {tmp_path}/path\nhead -n "$4" <<\'END\'\n{lines}\nEND\n'
    )
    program.chmod(0o755)
    return program


def agent(python: Path, **more: Any) -> RemoteAgentConfig:
    section = {"env": "sums", "python": str(python), "harness": "null", **more}
    return RemoteAgentConfig.model_validate({"verifiers": section})


def test_environment_of_verifiers_brings_its_tasks(python: Path, tmp_path: Path) -> None:
    settings = {"taskset": {"difficulty": 2}, "timeout": {"episode": 60}}
    section = agent(python, held_out=2, settings=settings, path=[str(tmp_path / "mine")])
    data = with_own_tasks(DataConfig(shuffle=False), section.agent)
    assert [task.task_id for task in held_out_tasks(data)] == ["t0", "t1"]
    tasks = training_tasks(data)
    drawn = [tasks.draw() for _ in range(4)]
    assert [task.task_id for task in drawn] == ["t2", "t3", "t4", "t2"]
    assert drawn[0].data["verifiers"] == {"idx": 2}
    assert section.fields_hidden == {"verifiers"}
    assert json.loads((tmp_path / "settings").read_text()) == {
        "taskset": {"id": "sums", "difficulty": 2},
        "timeout": {"episode": 60},
    }
    assert (tmp_path / "path").read_text().strip() == str(tmp_path / "mine")


def test_tasks_of_an_environment_are_a_source_by_name(python: Path) -> None:
    section = {"env": "sums", "python": str(python), "skip": 1, "take": 2}
    data = DataConfig.model_validate({"val_sources": {"a": {"verifiers": section}}})
    assert [task.task_id for task in held_out_tasks(data)] == ["t1", "t2"]
    assert held_out_tasks(data)[0].source == "a"
    beyond = DataConfig.model_validate({"val_sources": {"a": {"verifiers": section | {"skip": 9}}}})
    with pytest.raises(TaskFileError, match=r"'sums' has no task after the first 9"):
        held_out_tasks(beyond)


def test_listing_that_was_killed_gives_no_part_of_the_tasks(python: Path) -> None:
    with python.open("a") as program:
        program.write("kill -KILL $$\n")  # as the system does when memory runs out
    with pytest.raises(TaskFileError, match=r"cannot list its tasks with .*: exit code -9"):
        training_tasks(with_own_tasks(DataConfig(), agent(python).agent))


def test_environment_that_cannot_list_its_tasks_is_refused_with_its_last_line(
    tmp_path: Path,
) -> None:
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho Traceback >&2\necho 'ImportError: no sums' >&2\nexit 1\n")
    program.chmod(0o755)
    with pytest.raises(TaskFileError, match=r"cannot list its tasks with .*: ImportError: no sums"):
        training_tasks(with_own_tasks(DataConfig(), agent(program).agent))


def test_python_of_verifiers_must_exist(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"verifiers\.python: '.*/none' is not an execu"):
        VerifiersConfig(env="sums", python=tmp_path / "none").build()


async def test_program_of_verifiers_has_the_keys_of_a_command(python: Path) -> None:
    section = agent(python, program={"template": "folder", "env": {"A": "b"}}).verifiers
    assert isinstance(section, VerifiersConfig)
    assert section.program == ProgramConfig(template="folder", env={"A": "b"})
    await section.build().close()


def test_openenv_brings_resets_with_seeds() -> None:
    server = {"url": "http://127.0.0.1:8000", "seeds": 3, "held_out": 2, "max_steps": 5}
    section = RemoteAgentConfig.model_validate({"openenv": server | {"instructions": "{schema}"}})
    data = with_own_tasks(DataConfig(shuffle=False), section.agent)
    assert [task.data for task in held_out_tasks(data)] == [
        {"reset": {"seed": 0}},
        {"reset": {"seed": 1}},
    ]
    tasks = training_tasks(data)
    assert [tasks.draw().data["reset"]["seed"] for _ in range(4)] == [2, 3, 4, 2]


def test_tasks_of_the_configuration_come_first(tmp_path: Path) -> None:
    data = DataConfig.model_validate({"train_sources": {"a": {"resets": {"skip": 4, "take": 1}}}})
    server = RemoteAgentConfig.model_validate({"openenv": {"url": "http://127.0.0.1:8000"}})
    assert with_own_tasks(data, server.agent) is data
    assert training_tasks(data).draw().data == {"reset": {"seed": 4}}
    command = RemoteAgentConfig.model_validate({"command": {"argv": ["true"]}})
    assert with_own_tasks(DataConfig(), command.agent) == DataConfig()


TEXT = {"required": ["text"], "properties": {"text": {"type": "string"}}}


@pytest.mark.parametrize(
    ("answer", "schema", "action"),
    [
        ('{"word": "crane"}', {}, {"word": "crane"}),
        ('```json\n{"word": "crane"}\n```', {}, {"word": "crane"}),
        ("crane", {"required": ["word"]}, {"word": "crane"}),
        (" 7 ", {"required": ["number"]}, {"number": 7}),
        *(
            (
                said,
                {"required": ["text"], "properties": {"text": {"type": "string"}}},
                {"text": text},
            )
            for said, text in (("42", "42"), ("true", "true"), ('"quoted"', "quoted"))
        ),
        ("[" * 5000, {"required": ["text"]}, {"text": "[" * 5000}),
    ],
)
def test_action_is_what_the_model_wrote(
    answer: str, schema: dict[str, Any], action: dict[str, Any]
) -> None:
    assert action_of(answer, schema) == action


def test_text_is_no_action_where_several_fields_are_required() -> None:
    with pytest.raises(ActionError, match=r"write a JSON object with the fields \['x', 'y'\]"):
        action_of("north", {"required": ["x", "y"]})
