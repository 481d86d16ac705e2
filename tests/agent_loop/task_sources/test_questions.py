"""Questions about documents: what is asked, what becomes a task, and what is not asked twice."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from agent_loop.errors import ChatError
from agent_loop.records import Task
from agent_loop.task_sources.documents import DocumentTasks
from agent_loop.task_sources.questions import (
    QuestionModel,
    Questions,
    pairs_of,
    write_questions,
)
from agent_loop.tasks import DataConfig, training_tasks


class Writer:
    """An endpoint that asks for the colour of the first word of the text that it is shown."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.model: QuestionModel
        self.fails = 0

    async def answer(self, request: web.Request) -> web.Response:
        body = await request.json()
        if self.fails:
            self.fails -= 1
            return web.json_response({}, status=503)
        self.asked.append(body)
        text = body["messages"][0]["content"].split("\n\n")[1]
        word = text.split()[0]
        pairs = [{"question": f"What are {word}? ({n})", "answer": text} for n in range(3)]
        content = "no idea" if word == "nothing" else json.dumps({"questions": pairs})
        return web.json_response({"choices": [{"message": {"content": content}}]})


@pytest.fixture
async def writer() -> AsyncIterator[Writer]:
    made = Writer()
    app = web.Application()
    app.router.add_post("/v1/chat/completions", made.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    made.model = QuestionModel(f"http://127.0.0.1:{port}/v1", "writer", {})
    yield made
    await runner.cleanup()


@pytest.fixture
def documents(tmp_path: Path) -> Path:
    folder = tmp_path / "documents"
    folder.mkdir()
    for name, text in {"a": "apples are red", "b": "bread is brown", "c": "nothing"}.items():
        (folder / f"{name}.md").write_text(text)
    return folder


def parts(folder: Path) -> Iterator[Task]:
    return DocumentTasks(folder=folder).build("written", seed=0, shuffle=False).epoch(0)


async def test_questions_are_tasks_with_their_answers(
    writer: Writer, documents: Path, tmp_path: Path
) -> None:
    out = tmp_path / "questions.jsonl"
    written = await write_questions(parts(documents), writer.model, Questions(per_part=2), out)
    assert (written.questions, written.parts, written.unusable) == (4, 3, 1)
    assert "Write 2 questions about" in writer.asked[0]["messages"][0]["content"]
    assert writer.asked[0]["response_format"]["type"] == "json_schema"
    stream = training_tasks(DataConfig(train_files=(str(out),), shuffle=False), needs_prompt=True)
    tasks = {task.task_id: task for task in (stream.draw() for _ in range(4))}
    assert sorted(tasks) == [
        "written-a.md-1-1",
        "written-a.md-1-2",
        "written-b.md-1-1",
        "written-b.md-1-2",
    ]
    task = tasks["written-b.md-1-1"]
    assert task.prompt == "What are bread? (0)"
    assert (task.data["answer"], task.data["text"]) == ("bread is brown", "bread is brown")


async def test_only_parts_without_questions_are_asked_about_again(
    writer: Writer, documents: Path, tmp_path: Path
) -> None:
    out = tmp_path / "questions.jsonl"
    await write_questions(parts(documents), writer.model, Questions(), out)
    lines = out.read_bytes().splitlines(keepends=True)
    out.write_bytes(lines[0] + lines[1][:20])  # killed while it wrote the second line
    writer.asked.clear()
    written = await write_questions(parts(documents), writer.model, Questions(), out)
    assert len(writer.asked) == written.parts == 2
    assert sorted(out.read_bytes().splitlines(keepends=True)) == sorted(lines)


async def test_endpoint_that_fails_is_asked_again_until_the_attempts_are_used_up(
    writer: Writer, documents: Path, tmp_path: Path
) -> None:
    questions = Questions(concurrency=1, attempts=2)
    writer.fails = 1
    written = await write_questions(parts(documents), writer.model, questions, tmp_path / "a")
    assert written.parts == 3
    writer.fails = 2
    with pytest.raises(ChatError, match=r"/v1/chat/completions answered 503"):
        await write_questions(parts(documents), writer.model, questions, tmp_path / "b")


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
