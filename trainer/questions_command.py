"""`agentic-train questions`: tasks from documents, written by a model.

The model is a checkpoint, which our vLLM serves, or an OpenAI-compatible endpoint.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import islice
from pathlib import Path

from agent_loop.endpoint_loop import with_v1
from agent_loop.model_api import json_headers
from agent_loop.task_sources.documents import DocumentTasks
from agent_loop.task_sources.questions import (
    INSTRUCTIONS,
    QuestionModel,
    Questions,
    write_questions,
)
from proxy.engines.address import EngineAddress
from proxy.engines.vllm_server import VllmConfig, VllmServer
from trainer.commands.runs import reporting
from trainer.errors import ConfigError
from trainer.run.control import RunControl, StopRequested

SERVED_NAME = "writer"


def main(arguments: argparse.Namespace) -> int:
    """Runs `agentic-train questions`; returns its exit code."""
    return reporting("agentic-train questions", lambda: asyncio.run(_write(arguments)))


async def _write(arguments: argparse.Namespace) -> int:
    documents = DocumentTasks(
        folder=arguments.folder, pattern=arguments.pattern, part_chars=arguments.part_chars
    )
    parts = documents.build(arguments.out.stem, seed=0, shuffle=False).epoch(0)
    questions = Questions(
        per_part=arguments.per_part,
        instructions=arguments.instructions or INSTRUCTIONS,
        max_tokens=arguments.max_tokens,
        concurrency=arguments.concurrency,
    )
    control = RunControl()
    with control.signals():
        try:
            async with _model(arguments, control) as model:
                writing = write_questions(
                    islice(parts, arguments.limit), model, questions, arguments.out
                )
                written = await control.wait_for(writing)
        except StopRequested:
            print(f"interrupted; the same command continues with {arguments.out}")
            return 128 + (control.signal_number or 0)
    print(f"{written.questions} questions about {written.parts} parts in {arguments.out}")
    if written.unusable:
        print(f"{written.unusable} answers had no question in the requested form")
    return 1 if written.parts and not written.questions else 0


@asynccontextmanager
async def _model(
    arguments: argparse.Namespace, control: RunControl
) -> AsyncIterator[QuestionModel]:
    """The endpoint, or a vLLM with the checkpoint, which ends with this context."""
    if arguments.model.startswith(("http://", "https://")):
        if arguments.model_name is None:
            raise ConfigError(
                f"--model-name: missing; name the model that {arguments.model} serves"
            )
        headers = json_headers("--api-key-env", arguments.api_key_env, "the endpoint's API key")
        yield QuestionModel(with_v1(arguments.model), arguments.model_name, headers)
        return
    log = arguments.out.with_suffix(".vllm.log").absolute()
    print(f"starting vLLM on {arguments.model}, log in {log}", flush=True)
    server = VllmServer(VllmConfig(), Path(arguments.model), log=log, served_model_name=SERVED_NAME)
    try:
        await control.wait_for(server.start())
        address = EngineAddress.parse(server.url)
        headers = json_headers("", None, "") | address.headers
        yield QuestionModel(with_v1(address.url), SERVED_NAME, headers)
    finally:
        await server.stop()
