"""`agentic-proxy sessions list|show|export` and `replay`: the record, read from the store.

They need no running proxy, and may run beside one.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from proxy.commands.export import FORMATS, export
from proxy.commands.replay import replay
from proxy.config import load_config
from proxy.conversation import load_answer
from proxy.engines.vllm_scoring import VllmScorer
from proxy.errors import ConfigurationError, EngineError, RequestError
from proxy.records import Session, SessionKind, SessionStatus, Turn
from proxy.rendering.tokenizer import Tokenizer, load_tokenizer
from proxy.store import open_store
from proxy.store.protocol import SessionFilter, Store

PAGE = 100
SHOWN_CHARS = 400
"""Of an answer, without `--tokens`."""
_INDENT = "  "


def add_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    sessions = commands.add_parser("sessions", help="the recorded sessions")
    actions = sessions.add_subparsers(required=True, metavar="list|show|export")
    _add_list(actions.add_parser("list", help="one line per session"))
    _add_show(actions.add_parser("show", help="a session's turns, forks and their causes"))
    _add_export(actions.add_parser("export", help="write sessions to a file"))
    again = commands.add_parser("replay", help="score a session again and compare")
    _add_store(again)
    again.add_argument("trial_id")
    again.add_argument("--engine", required=True, metavar="URL", help="a vLLM with these weights")
    again.add_argument("--tolerance", type=float, help="largest difference that is no failure")
    again.set_defaults(run=lambda arguments: asyncio.run(_replay(arguments)))


async def _list(arguments: argparse.Namespace) -> int:
    columns = ("trial", "kind", "status", "turns", "forks", "sampled", "rewards")
    table = Table(*columns, box=None, pad_edge=False)
    async with _store(arguments) as store:
        async for session, turns in _records(store, _where(arguments)):
            causes = Counter(turn.fork_cause.value for turn in turns if turn.fork_cause)
            table.add_row(
                session.session_id,
                session.kind.value,
                session.status.value,
                str(len(turns)),
                " ".join(f"{cause}:{count}" for cause, count in causes.items()),
                str(sum(len(turn.sampled_ids) for turn in turns)),
                " ".join(f"{reward.key}={reward.value:g}" for reward in session.rewards),
            )
    Console(soft_wrap=True).print(table)
    return 0


async def _show(arguments: argparse.Namespace) -> int:
    tokenizer = None
    if arguments.tokens:
        if arguments.model is None:
            raise ConfigurationError("--tokens: say --model FOLDER, whose tokenizer names them")
        tokenizer = load_tokenizer(arguments.model)
    console = Console(soft_wrap=True)
    async with _store(arguments) as store:
        session, turns = await _one(store, arguments.trial_id)
    console.print(f"{session.session_id} {session.kind} {session.status} {len(turns)} turns")
    for reward in session.rewards:
        console.print(f"reward {reward.key} = {reward.value:g} {dict(reward.parts) or ''}")
    for turn in turns:
        console.print(_turn_text(turn, tokenizer), highlight=False)
    return 0


async def _export(arguments: argparse.Namespace) -> int:
    async with _store(arguments) as store:
        records = _records(store, _where(arguments))
        if arguments.trial_id:
            records = _named(store, arguments.trial_id)
        count = await export(records, arguments.out, arguments.format)
    print(f"{count} sessions in {arguments.out}")
    return 0


async def _replay(arguments: argparse.Namespace) -> int:
    async with _store(arguments) as store:
        _, turns = await _one(store, arguments.trial_id)
    scorer = VllmScorer(arguments.engine)
    try:
        compared, skipped = await replay(turns, scorer)
    except RequestError as error:
        raise EngineError(error.message) from error
    finally:
        await scorer.close()
    for entry in compared:
        print(
            f"turn {entry.turn}: {entry.tokens} tokens of version "
            f"{', '.join(map(str, entry.versions))}: largest difference {entry.largest:.2e}, "
            f"mean {entry.mean:.2e}"
        )
    for why in skipped:
        print(why)
    largest = max((entry.largest for entry in compared), default=0.0)
    print(f"{len(compared)} of {len(turns)} turns compared, largest difference {largest:.2e}")
    failed = arguments.tolerance is not None and largest > arguments.tolerance
    if failed:
        print(f"more than --tolerance {arguments.tolerance:g}", file=sys.stderr)
    return 1 if failed else 0


def _turn_text(turn: Turn, tokenizer: Tokenizer | None) -> Text:
    came_from = "root" if turn.parent is None else f"after turn {turn.parent}"
    cause = f" ({turn.fork_cause})" if turn.fork_cause else ""
    text = Text(
        f"\nturn {turn.index} {turn.status} {came_from}{cause}: {turn.shared_tokens} shared + "
        f"{len(turn.prompt_ids)} new + {len(turn.sampled_ids)} sampled, {turn.finish_reason}\n",
        style="bold",
    )
    if tokenizer is not None:
        text.append(tokenizer.decode(turn.prompt_ids), style="dim")
        for token, logprob in zip(turn.sampled_ids.tolist(), turn.logprobs.tolist(), strict=True):
            text.append(tokenizer.decode([token]), style="green")
            text.append(f"[{token} {logprob:.2f}]", style="dim cyan")
    elif turn.answer:
        answer = load_answer(turn.answer)
        text.append(_INDENT + answer.text[:SHOWN_CHARS])
        for call in answer.tool_calls:
            text.append(f"\n{_INDENT}{call.name}({call.arguments[:SHOWN_CHARS]})", style="cyan")
    return text


async def _records(store: Store, where: SessionFilter) -> AsyncIterator[tuple[Session, list[Turn]]]:
    after: str | None = None
    while True:
        page = await store.list_sessions(
            SessionFilter(where.status, where.kind, where.id_prefix, after, PAGE)
        )
        for session in page:
            yield session, await store.get_turns(session.session_id)
        if len(page) < PAGE:
            return
        after = page[-1].session_id


async def _named(store: Store, ids: list[str]) -> AsyncIterator[tuple[Session, list[Turn]]]:
    for trial_id in ids:
        yield await _one(store, trial_id)


async def _one(store: Store, trial_id: str) -> tuple[Session, list[Turn]]:
    session = await store.get_session(trial_id)
    if session is None:
        raise ConfigurationError(f"session {trial_id!r} is not in this store")
    return session, await store.get_turns(trial_id)


@asynccontextmanager
async def _store(arguments: argparse.Namespace) -> AsyncIterator[Store]:
    given = {} if arguments.store is None else {"store": arguments.store}
    store = await open_store(load_config(arguments.config, **given).store)
    try:
        yield store
    finally:
        await store.close()


def _where(arguments: argparse.Namespace) -> SessionFilter:
    return SessionFilter(
        status=SessionStatus(arguments.status) if arguments.status else None,
        kind=SessionKind(arguments.kind) if arguments.kind else None,
        id_prefix=arguments.prefix,
    )


def _add_list(parser: argparse.ArgumentParser) -> None:
    _add_store(parser)
    _add_filters(parser)
    parser.set_defaults(run=lambda arguments: asyncio.run(_list(arguments)))


def _add_show(parser: argparse.ArgumentParser) -> None:
    _add_store(parser)
    parser.add_argument("trial_id")
    parser.add_argument("--tokens", action="store_true", help="every token and its log-probability")
    parser.add_argument("--model", type=Path, help="folder of the checkpoint, for --tokens")
    parser.set_defaults(run=lambda arguments: asyncio.run(_show(arguments)))


def _add_export(parser: argparse.ArgumentParser) -> None:
    _add_store(parser)
    _add_filters(parser)
    parser.add_argument("trial_id", nargs="*", help="only these; default: all that the filters let")
    parser.add_argument("--format", choices=FORMATS, default="jsonl")
    parser.add_argument("--out", type=Path, required=True, help="a file; a folder for binary")
    parser.set_defaults(run=lambda arguments: asyncio.run(_export(arguments)))


def _add_store(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, help="YAML file of the proxy")
    parser.add_argument("--store", help="sqlite:///FILE or postgresql://…")


def _add_filters(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--status", choices=[status.value for status in SessionStatus])
    parser.add_argument("--kind", choices=[kind.value for kind in SessionKind])
    parser.add_argument("--prefix", default="", help="of the session's id")
