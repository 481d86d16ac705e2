"""Questions about documents, written by a model, as a file of tasks.

    python -m examples.documents.questions handbook --model http://127.0.0.1:8001/v1 \\
        --model-name writer --out questions.jsonl

The model is behind an OpenAI-compatible endpoint, such as `vllm serve`. It is shown one part of a
document at a time and writes questions with their answers as JSON, which the endpoint enforces by a
schema. Each question is one line of the file, in which a person can read and change them before
they are trained on (`data.train_files`).

Invariant: a part whose questions are in the file is not asked about again, so that the same command
continues where it was interrupted. What a model did not write in the requested form is counted, and
never becomes a task.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import orjson
from openai import AsyncOpenAI, OpenAIError

from examples.documents.documents import parts

INSTRUCTIONS = """Write {count} about the following text. A question must be understandable \
without the text, and its answer must be short and stand in the text.

{text}"""
FORM = '\n\nAnswer with JSON alone: {"questions": [{"question": "…", "answer": "…"}]}'
_PAIR = {
    "type": "object",
    "properties": {"question": {"type": "string"}, "answer": {"type": "string"}},
    "required": ["question", "answer"],
    "additionalProperties": False,
}
_SCHEMA = {
    "type": "object",
    "properties": {"questions": {"type": "array", "items": _PAIR}},
    "required": ["questions"],
    "additionalProperties": False,
}
Part = Mapping[str, Any]


@dataclass(slots=True)
class Written:
    """Example: Written(questions=12, parts=6, unusable=1)"""

    questions: int = 0
    """Number of lines that were added to the file."""
    parts: int = 0
    """Number of parts about which the model was asked."""
    unusable: int = 0
    """Number of answers in another form, from which no question was taken."""


async def write_questions(
    documents: Iterator[Part],
    client: AsyncOpenAI,
    model: str,
    out: Path,
    *,
    per_part: int = 1,
    instructions: str = INSTRUCTIONS,
    max_tokens: int = 1024,
    concurrency: int = 8,
) -> Written:
    """Asks about each part of a document that `out` has no question about, and adds the questions
    to `out`.

    Raises:
        OpenAIError: the endpoint did not answer. What was written is kept.
    """
    done, written = _parts_in(out), Written()
    waiting = (part for part in documents if _place(part) not in done)
    count = f"{per_part} question{'s' * (per_part > 1)}"

    async def ask() -> None:
        for part in waiting:
            text = instructions.replace("{count}", count).replace("{text}", part["text"])
            answer = await client.chat.completions.create(
                model=model,
                messages=[{"role": "user", "content": text + FORM}],
                max_tokens=max_tokens,
                response_format={
                    "type": "json_schema",
                    "json_schema": {"name": "questions", "schema": _SCHEMA, "strict": True},
                },
            )
            pairs = pairs_of(answer.choices[0].message.content or "")[:per_part]
            written.parts += 1
            written.unusable += not pairs
            written.questions += len(pairs)
            with out.open("ab") as file:
                for number, (question, reply) in enumerate(pairs, start=1):
                    task = {**part, "task_id": f"{part['task_id']}-{number}"}
                    file.write(orjson.dumps(task | {"prompt": question, "answer": reply}) + b"\n")

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(ask())
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return written


def pairs_of(answer: str) -> list[tuple[str, str]]:
    """The questions of an answer, each with its own answer; empty if it has another form."""
    start, end = answer.find("{"), answer.rfind("}")
    try:
        value: Any = orjson.loads(answer[start : end + 1])
        pairs = [(str(each["question"]), str(each["answer"])) for each in value["questions"]]
    except (orjson.JSONDecodeError, LookupError, TypeError):
        return []
    return [(question, reply) for question, reply in pairs if question.strip() and reply.strip()]


def _parts_in(out: Path) -> set[tuple[str, int]]:
    """The parts that the file has questions about. A last line that was cut off is removed."""
    if not out.exists():
        return set()
    lines = out.read_bytes()
    whole = lines[: lines.rfind(b"\n") + 1]
    if len(whole) < len(lines):
        out.write_bytes(whole)
    return {_place(orjson.loads(line)) for line in whole.splitlines()}


def _place(part: Part) -> tuple[str, int]:
    return part["document"], part["part"]


def main(words: list[str] | None = None) -> int:
    """Returns 1 if the endpoint did not answer, or no answer had the requested form."""
    parser = argparse.ArgumentParser(prog="python -m examples.documents.questions")
    parser.add_argument("folder", help="folder of the documents")
    parser.add_argument("--model", required=True, metavar="URL", help="the endpoint, with /v1")
    parser.add_argument("--model-name", required=True, help="the model that the endpoint serves")
    parser.add_argument("--out", required=True, type=Path, help="the file of tasks")
    parser.add_argument("--pattern", default="**/*.md", help="which files are documents")
    parser.add_argument("--part-chars", type=int, default=4000, help="characters of a part")
    parser.add_argument("--per-part", type=int, default=1, help="questions per part")
    parser.add_argument("--limit", type=int, help="number of parts; default: all")
    given = parser.parse_args(words)
    documents = parts(None, folder=given.folder, pattern=given.pattern, part_chars=given.part_chars)

    async def write() -> Written:
        key = os.environ.get("OPENAI_API_KEY", "none")
        async with AsyncOpenAI(base_url=given.model, api_key=key) as client:
            return await write_questions(
                islice(documents, given.limit), client, given.model_name, given.out,
                per_part=given.per_part,
            )  # fmt: skip

    try:
        written = asyncio.run(write())
    except OpenAIError as error:
        print(f"questions: {given.model}: {error}", file=sys.stderr)
        return 1
    print(f"{written.questions} questions about {written.parts} parts in {given.out}")
    if written.unusable:
        print(f"{written.unusable} answers had no question in the requested form")
    return 1 if written.parts and not written.questions else 0


if __name__ == "__main__":
    sys.exit(main())
