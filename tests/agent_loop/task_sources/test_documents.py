"""Tasks from documents: what the parts of a document are, and how the template is filled."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_loop.errors import TaskFileError
from agent_loop.task_sources.documents import DocumentTasks, divided
from agent_loop.tasks import DataConfig, training_tasks


def test_each_part_of_each_document_is_a_task(tmp_path: Path) -> None:
    (tmp_path / "guides").mkdir()
    (tmp_path / "guides" / "a.md").write_text(f"# Apples\n\n{'red ' * 30}\n\n{'green ' * 20}")
    (tmp_path / "b.md").write_text("Not {title}.")
    (tmp_path / "c.txt").write_text("no document")
    config = DocumentTasks(folder=tmp_path, part_chars=150, template="On {title}:\n{text}")
    tasks = list(config.build("guide", seed=0, shuffle=False).epoch(0))
    assert [task.task_id for task in tasks] == [
        "guide-b.md-1",
        "guide-guides/a.md-1",
        "guide-guides/a.md-2",
    ]
    assert tasks[0].prompt == "On b:\nNot {title}."
    assert tasks[1].prompt.startswith("On Apples:\n# Apples\n\nred red")
    assert tasks[2].data == {
        "prompt": f"On Apples:\n{('green ' * 20).strip()}",
        "text": ("green " * 20).strip(),
        "title": "Apples",
        "document": "guides/a.md",
        "part": 2,
    }


def test_order_depends_on_seed_and_epoch(tmp_path: Path) -> None:
    for number in range(20):
        (tmp_path / f"{number}.md").write_text(f"text {number}")
    parts = DocumentTasks(folder=tmp_path).build("a", seed=1, shuffle=True)
    first, second = ([task.prompt for task in parts.epoch(number)] for number in (0, 1))
    assert first == [task.prompt for task in parts.epoch(0)]
    assert first != second
    assert sorted(first) == sorted(second)


@given(st.text(alphabet="ab \n", max_size=300), st.integers(1, 40))
def test_parts_hold_the_whole_text_within_the_bound(text: str, chars: int) -> None:
    parts = list(divided(text, chars))
    assert all(0 < len(part) <= chars for part in parts)
    assert "".join("".join(parts).split()) == "".join(text.split())


def test_parts_end_at_paragraphs_then_lines_then_words() -> None:
    assert list(divided("one two\n\nthree four", 15)) == ["one two", "three four"]
    assert list(divided("one two\nthree four", 15)) == ["one two", "three four"]
    assert list(divided("one two three", 8)) == ["one two", "three"]
    assert list(divided("onetwothree", 8)) == ["onetwoth", "ree"]


def test_folder_without_documents_is_refused(tmp_path: Path) -> None:
    section = {"train_sources": {"a": {"documents": {"folder": str(tmp_path)}}}}
    with pytest.raises(TaskFileError, match=r"no document in it .* '\*\*/\*\.md'"):
        training_tasks(DataConfig.model_validate(section))


def test_document_that_is_not_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_bytes(b"\xff\xfe")
    with pytest.raises(TaskFileError, match=r"a\.md: cannot read it as UTF-8 text"):
        list(DocumentTasks(folder=tmp_path).build("a", seed=0, shuffle=True).epoch(0))
