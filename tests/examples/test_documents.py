"""`examples/documents`: parts of documents as tasks, and questions about them as a task file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_loop.tasks import DataConfig, training_tasks
from examples.documents.documents import divided, parts
from examples.documents.questions import main, pairs_of
from tests.examples.openai_server import openai_server

PAIRS = [{"question": f"What are apples? ({n})", "answer": "red"} for n in range(3)]
ANSWER = {"content": json.dumps({"questions": PAIRS})}
Ask = Callable[[list[dict[str, Any]]], tuple[int, list[dict[str, Any]]]]


def test_each_part_of_each_document_is_a_task(tmp_path: Path) -> None:
    (tmp_path / "guides").mkdir()
    (tmp_path / "guides" / "a.md").write_text(f"# Apples\n\n{'red ' * 30}\n\n{'green ' * 20}")
    (tmp_path / "b.md").write_text("Not {title}.")
    (tmp_path / "c.txt").write_text("no document")
    template = "On {title}:\n{text}"
    tasks = list(parts(None, folder=str(tmp_path), part_chars=150, template=template))
    assert [task["task_id"] for task in tasks] == ["b.md-1", "guides/a.md-1", "guides/a.md-2"]
    assert tasks[0]["prompt"] == "On b:\nNot {title}."
    assert tasks[1]["prompt"].startswith("On Apples:\n# Apples\n\nred red")
    text = ("green " * 20).strip()
    assert tasks[2] == {
        "task_id": "guides/a.md-2",
        "prompt": f"On Apples:\n{text}",
        "text": text,
        "title": "Apples",
        "document": "guides/a.md",
        "part": 2,
    }


def test_a_run_draws_the_parts_in_another_order_in_each_epoch(tmp_path: Path) -> None:
    for number in range(20):
        (tmp_path / f"{number}.md").write_text(f"text {number}")
    function = {
        "target": "examples.documents.documents:parts",
        "settings": {"folder": str(tmp_path)},
    }
    data = DataConfig.model_validate({"train_sources": {"a": {"function": function}}})
    again, stream = training_tasks(data), training_tasks(data)
    first, second = ([stream.draw().prompt for _ in range(20)] for _ in range(2))
    assert first == [again.draw().prompt for _ in range(20)]
    assert first != second
    assert sorted(first) == sorted(second)


@given(st.text(alphabet="ab \n", max_size=300), st.integers(1, 40))
def test_parts_hold_the_whole_text_within_the_bound(text: str, chars: int) -> None:
    found = list(divided(text, chars))
    assert all(0 < len(part) <= chars for part in found)
    assert "".join("".join(found).split()) == "".join(text.split())


def test_parts_end_at_paragraphs_then_lines_then_words() -> None:
    assert list(divided("one two\n\nthree four", 15)) == ["one two", "three four"]
    assert list(divided("one two\nthree four", 15)) == ["one two", "three four"]
    assert list(divided("one two three", 8)) == ["one two", "three"]
    assert list(divided("onetwothree", 8)) == ["onetwoth", "ree"]


def test_folder_without_documents_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no document in it .* '\*\*/\*\.md'"):
        list(parts(0, folder=str(tmp_path)))


@pytest.fixture
def ask(tmp_path: Path) -> Ask:
    """Runs the command on three documents; returns its exit code and the requests."""
    (tmp_path / "documents").mkdir()
    for name in "abc":
        (tmp_path / f"documents/{name}.md").write_text(f"{name}: apples are red")
    out = str(tmp_path / "questions.jsonl")

    def run(answers: list[dict[str, Any]]) -> tuple[int, list[dict[str, Any]]]:
        with openai_server(answers) as (url, seen):
            words = [str(tmp_path / "documents"), "--model", url, "--model-name", "writer"]
            return main([*words, "--out", out, "--per-part", "2"]), seen

    return run


def test_questions_are_tasks_with_their_answers(ask: Ask, tmp_path: Path) -> None:
    code, seen = ask([ANSWER, {"content": "no idea"}, ANSWER])
    assert code == 0
    assert "Write 2 questions about" in seen[0]["messages"][0]["content"]
    assert (seen[0]["model"], seen[0]["response_format"]["type"]) == ("writer", "json_schema")
    data = DataConfig(train_files=(str(tmp_path / "questions.jsonl"),), shuffle=False)
    stream = training_tasks(data, needs_prompt=True)
    tasks = [stream.draw() for _ in range(4)]
    assert len({task.task_id for task in tasks}) == 4
    assert {task.prompt for task in tasks} == {"What are apples? (0)", "What are apples? (1)"}
    assert {task.data["answer"] for task in tasks} == {"red"}


def test_only_parts_without_questions_are_asked_about_again(
    ask: Ask, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "questions.jsonl"
    ask([ANSWER, ANSWER, ANSWER])
    lines = out.read_bytes().splitlines(keepends=True)
    out.write_bytes(b"".join(lines[:4]) + lines[4][:20])  # killed while it wrote the third part
    code, seen = ask([ANSWER])
    assert (code, len(seen)) == (0, 1)
    assert sorted(out.read_bytes().splitlines(keepends=True)) == sorted(lines)
    assert "2 questions about 1 parts in" in capsys.readouterr().out


def test_answers_without_a_question_are_counted_and_end_with_1(
    ask: Ask, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ask([{"content": "I do not know."}] * 3)[0] == 1
    assert "3 answers had no question in the requested form" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("answer", "pairs"),
    [
        ('{"questions": [{"question": "a?", "answer": "b"}]}', [("a?", "b")]),
        ('```json\n{"questions": [{"question": "a?", "answer": 2}]}\n```', [("a?", "2")]),
        ('{"questions": [{"question": "a?", "answer": " "}]}', []),
        ('{"questions": [{"question": "a?"}]}', []),
        ("none", []),
        ("[1]", []),
    ],
)
def test_pairs_of_an_answer(answer: str, pairs: list[tuple[str, str]]) -> None:
    assert pairs_of(answer) == pairs


@given(st.text())
def test_any_answer_is_read_without_an_error(answer: str) -> None:
    assert isinstance(pairs_of(answer), list)
