"""`agentic-train questions` with an endpoint whose answers are scripted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.examples.openai_server import openai_server
from trainer.cli import main

ANSWER = {"questions": [{"question": "What colour are apples?", "answer": "red"}]}


def command(folder: Path, url: str, *words: str) -> list[str]:
    (folder / "documents").mkdir(exist_ok=True)
    (folder / "documents" / "a.md").write_text("Apples are red.")
    out = str(folder / "questions.jsonl")
    return ["questions", str(folder / "documents"), "--model", url, "--out", out, *words]


def test_an_endpoint_writes_a_file_of_tasks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WRITER_KEY", "secret")
    words = ("--model-name", "writer", "--api-key-env", "WRITER_KEY", "--per-part", "2")
    with openai_server([{"content": json.dumps(ANSWER)}]) as (url, seen):
        assert main(command(tmp_path, url.removesuffix("/v1"), *words)) == 0
    assert seen[0]["model"] == "writer"
    (line,) = (tmp_path / "questions.jsonl").read_text().splitlines()
    task = json.loads(line)
    assert (task["prompt"], task["answer"]) == ("What colour are apples?", "red")
    assert "1 questions about 1 parts in " in capsys.readouterr().out


def test_answers_without_a_question_are_counted_and_end_with_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with openai_server([{"content": "I do not know."}]) as (url, _):
        assert main(command(tmp_path, url, "--model-name", "writer")) == 1
    assert "1 answers had no question in the requested form" in capsys.readouterr().out


def test_an_endpoint_without_a_models_name_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command(tmp_path, "http://127.0.0.1:1")) == 2
    assert "--model-name: missing" in capsys.readouterr().err


def test_a_folder_that_is_no_checkpoint_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command(tmp_path, str(tmp_path))) == 2
    assert "has no config.json" in capsys.readouterr().err
