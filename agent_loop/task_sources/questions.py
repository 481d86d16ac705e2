"""Questions about documents, written by a model: the tasks of `agentic-train questions`.

The model is shown one part of a document at a time and writes questions with their answers as JSON,
which the endpoint enforces by a schema. Each question is one line of a task file, in which a person
can read and change them before they are trained on.

Invariant: a part whose questions are in the file is not asked about again, so that the same command
continues where it was interrupted. What a model did not write in the requested form is counted, and
never becomes a task.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import orjson
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_attempt, wait_exponential

from agent_loop.errors import ChatError
from agent_loop.model_api import chat_completion
from agent_loop.records import Task
from proxy.machine.direct_hosts import proxy_for

INSTRUCTIONS = """Write {count} about the following text. A question must be understandable \
without the text, and its answer must be short and stand in the text.

{text}"""
FORM = '\n\nAnswer with JSON alone: {"questions": [{"question": "…", "answer": "…"}]}'
MAX_WAIT_S = 10.0
"""Longest wait before a request is repeated."""
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


@dataclass(frozen=True, slots=True)
class QuestionModel:
    """The model that writes. Example: QuestionModel("http://127.0.0.1:9000/v1", "qwen3", {})"""

    base_url: str
    """URL of an OpenAI-compatible endpoint, with `/v1`."""
    model: str
    headers: Mapping[str, str] = field(repr=False)
    """Headers of each request, which authorise it."""


@dataclass(frozen=True, slots=True)
class Questions:
    """How questions are written. Example: Questions(per_part=2)"""

    per_part: int = 1
    """Number of questions about a part of a document."""
    instructions: str = INSTRUCTIONS
    """What the model is asked; `{count}` is replaced by `2 questions`, `{text}` by the part."""
    max_tokens: int = 1024
    """Maximum number of tokens of an answer."""
    concurrency: int = 8
    """Maximum number of requests at the same time."""
    timeout_s: float = 300.0
    attempts: int = 3
    """Maximum number of requests about a part, if the endpoint does not answer."""


@dataclass(slots=True)
class WrittenQuestions:
    """Example: WrittenQuestions(questions=12, parts=6, unusable=1)"""

    questions: int = 0
    """Number of lines that were added to the file."""
    parts: int = 0
    """Number of parts about which the model was asked."""
    unusable: int = 0
    """Number of answers in another form, from which no question was taken."""


async def write_questions(
    parts: Iterator[Task], asked: QuestionModel, questions: Questions, out: Path
) -> WrittenQuestions:
    """Asks about each part of a document that `out` has no question about, and adds the questions
    to `out`, a task file.

    Raises:
        ChatError: the endpoint did not answer `questions.attempts` times. What was written is kept.
    """
    done, written = _parts_in(out), WrittenQuestions()
    waiting = (part for part in parts if _place(part.data) not in done)
    async with aiohttp.ClientSession(proxy=proxy_for(asked.base_url)) as http:

        async def ask() -> None:
            for part in waiting:
                answer = await _answer(http, asked, questions, part)
                pairs = pairs_of(answer)[: questions.per_part]
                written.parts += 1
                written.unusable += not pairs
                written.questions += len(pairs)
                with out.open("ab") as file:
                    for number, (question, reply) in enumerate(pairs, start=1):
                        task_id = f"{part.task_id}-{number}"
                        data = {**part.data, "prompt": question, "answer": reply}
                        file.write(orjson.dumps({"task_id": task_id, **data}) + b"\n")

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(questions.concurrency):
                    group.create_task(ask())
        except ExceptionGroup as error:
            raise error.exceptions[0] from None
    return written


async def _answer(
    http: aiohttp.ClientSession, asked: QuestionModel, questions: Questions, part: Task
) -> str:
    count = f"{questions.per_part} question{'s' * (questions.per_part > 1)}"
    prompt = questions.instructions.replace("{count}", count)
    prompt = prompt.replace("{text}", str(part.data["text"])) + FORM
    body = {
        "model": asked.model,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": questions.max_tokens,
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "questions", "schema": _SCHEMA, "strict": True},
        },
    }
    retrying = AsyncRetrying(
        retry=retry_if_exception_type(ChatError),
        stop=stop_after_attempt(questions.attempts),
        wait=wait_exponential(multiplier=0.5, max=MAX_WAIT_S),
        reraise=True,
    )
    return await retrying(
        chat_completion, http, asked.base_url, asked.headers, body, questions.timeout_s
    )


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


def _place(data: Mapping[str, Any]) -> tuple[str, int]:
    return data["document"], data["part"]
