"""`agentic-proxy sessions list|show|rate|tag|delete`: reads the record from the store.

It needs no running proxy, but one may be running. Invariant: it never creates a store.
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from proxy.commands.notes import THIS, note
from proxy.commands.terminal import one_line, visible
from proxy.config import ProxyConfig, load_config
from proxy.conversation.first_words import first_words
from proxy.conversation.messages import load_answer
from proxy.errors import ConfigurationError, SessionError
from proxy.records import FOLDER, GIT_BRANCH, Session, SessionKind, SessionStatus, Turn
from proxy.records.images import decoded
from proxy.rendering.tokenizer import Tokenizer, load_tokenizer
from proxy.store import open_store
from proxy.store.curation import RATING, THUMBS, keep
from proxy.store.protocol import SessionFilter, Store

COLUMNS = (
    *("trial", "kind", "status", "turns", "forks", "sampled", "rewards", "marks"),
    *("lasted", "folder", "branch", "asked"),
)
WIDEST = 100_000
PAGE = 100
"""Sessions read from the store at a time."""
_INDENT = "  "


async def list_sessions(arguments: Namespace) -> int:
    """Prints one line per session."""
    table = Table(*COLUMNS, box=None, pad_edge=False)
    async with named_store(arguments) as (store, _):
        async for session, turns in _records(store, where(arguments)):
            causes = Counter(turn.fork_cause.value for turn in turns if turn.fork_cause)
            row = (
                session.session_id,
                session.kind.value,
                session.status.value,
                str(len(turns)),
                " ".join(f"{cause}:{count}" for cause, count in causes.items()),
                str(sum(len(turn.sampled_ids) for turn in turns)),
                " ".join(f"{reward.key}={reward.value:g}" for reward in session.rewards),
                " ".join(f"{mark.rule}:{mark.action}" for mark in session.marks),
                _lasted(session, turns),
                Path(str(session.metadata.get(FOLDER, ""))).name,
                str(session.metadata.get(GIT_BRANCH, "")),
                first_words(turn.request for turn in turns),
            )
            table.add_row(*(Text(one_line(cell)) for cell in row))
    # No column is cut, whatever the terminal's width: ids are copied.
    Console(soft_wrap=True, width=Console(width=WIDEST).measure(table).maximum).print(table)
    return 0


async def show_session(arguments: Namespace) -> int:
    """Prints a session's turns: the prompt, the answer, and the cause of each fork."""
    async with named_store(arguments) as (store, config):
        session, turns = await one_session(store, arguments.trial_id)
        events = await store.get_events(session.session_id)
    model = arguments.model or config.model
    if arguments.tokens and model is None:
        raise ConfigurationError(
            "--tokens needs --model FOLDER, the checkpoint whose tokenizer decodes the tokens"
        )
    tokenizer = None if model is None else load_tokenizer(model)
    console = Console(soft_wrap=True, highlight=False, markup=False)
    console.print(f"{session.session_id} {session.kind} {session.status} {len(turns)} turns")
    for reward in session.rewards:
        console.print(f"reward {reward.key} = {reward.value:g} {dict(reward.parts) or ''}")
    for event in events:
        if event["kind"] == RATING and event["comment"]:
            rated = "comment" if event["value"] is None else f"rated {event['value']:g}"
            console.print(f"{rated}: {visible(event['comment'])}")
    for mark in session.marks:
        found = f": {one_line(mark.found)}" if mark.found else ""
        console.print(f"turn {mark.turn} matches rule {mark.rule} ({mark.action}){found}")
    if tokenizer is None:
        console.print(
            "Prompts are recorded as token ids. To print them as text, add --model FOLDER (the"
            " folder of the checkpoint)."
        )
    for turn in turns:
        console.print(_turn_text(turn, tokenizer, with_tokens=arguments.tokens))
    return 0


def _lasted(session: Session, turns: list[Turn]) -> str:
    """From its creation to its end, or to the end of its last call."""
    ends = [turn.started_at + (turn.duration_s or 0.0) for turn in turns[-1:]]
    end = session.completed_at or max(ends, default=session.created_at)
    minutes, seconds = divmod(round(max(end - session.created_at, 0.0)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


async def rate_session(arguments: Namespace) -> int:
    """Keeps a person's rating of a session, in place of an earlier one."""
    given: str = arguments.value
    try:
        value = THUMBS[given] if given in THUMBS else float(given)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ConfigurationError(f"{given}: give up, down, or a number")
    await _keep(arguments, value=value, comment=arguments.comment or "")
    return 0


async def tag_session(arguments: Namespace) -> int:
    """Sets entries of a session's metadata, or removes those without a value."""
    await _keep(arguments, tags=tags(arguments.tags))
    return 0


async def _keep(arguments: Namespace, **said: Any) -> None:
    """`said`: arguments of `curation.keep`. Inside an agent, they are noted for `run`, which
    reaches the store."""
    if arguments.trial_id == THIS:
        note(said)
        print("noted: it is kept when the agent ends")
        return
    async with named_store(arguments) as (store, _):
        try:
            await keep(store, arguments.trial_id, **said)
        except (ValueError, SessionError) as error:
            raise ConfigurationError(str(error)) from error


async def delete_session(arguments: Namespace) -> int:
    """Removes a session with its turns, rewards and events."""
    async with named_store(arguments) as (store, _):
        session, _ = await one_session(store, arguments.trial_id)
        if session.status is SessionStatus.OPEN:
            raise ConfigurationError(
                f"session {arguments.trial_id!r} is open; end its agent first, or delete it at its "
                "proxy: DELETE /sessions/ID"
            )
        await store.delete_session(session.session_id)
    return 0


def _turn_text(turn: Turn, tokenizer: Tokenizer | None, *, with_tokens: bool) -> Text:
    """The whole turn; without a tokenizer, only its answer."""
    text = _head(turn)
    if tokenizer is None:
        _append_answer(text, turn)
        return text
    text.append(visible(decoded(turn.prompt_ids, tokenizer.decode)), style="dim")
    if not with_tokens:
        text.append(visible(tokenizer.decode(turn.sampled_ids)), style="green")
        return text
    for token, logprob in zip(turn.sampled_ids.tolist(), turn.logprobs.tolist(), strict=True):
        text.append(visible(tokenizer.decode([token])), style="green")
        text.append(f"[{token} {logprob:.2f}]", style="dim cyan")
    return text


def _head(turn: Turn) -> Text:
    place = "root" if turn.parent is None else f"after turn {turn.parent}"
    cause = f" ({turn.fork_cause})" if turn.fork_cause else ""
    return Text().append(
        f"\nturn {turn.index} {turn.status} {place}{cause}: {turn.shared_tokens} shared + "
        f"{len(turn.prompt_ids)} new + {len(turn.sampled_ids)} sampled, {turn.finish_reason}\n",
        style="bold",
    )


def _append_answer(text: Text, turn: Turn) -> None:
    if not turn.answer:
        return
    answer = load_answer(turn.answer)
    text.append(_INDENT + visible(answer.text))
    for call in answer.tool_calls:
        text.append(f"\n{_INDENT}{visible(f'{call.name}({call.arguments})')}", style="cyan")


async def _records(
    store: Store, wanted: SessionFilter
) -> AsyncIterator[tuple[Session, list[Turn]]]:
    after: str | None = None
    while True:
        page = await store.list_sessions(replace(wanted, after=after, limit=PAGE))
        for session in page:
            yield session, await store.get_turns(session.session_id)
        if len(page) < PAGE:
            return
        after = page[-1].session_id


async def one_session(store: Store, trial_id: str) -> tuple[Session, list[Turn]]:
    session = await store.get_session(trial_id)
    if session is None:
        raise ConfigurationError(
            f"session {trial_id!r} is not in this store; `agentic-proxy sessions list` prints all"
            " ids"
        )
    return session, await store.get_turns(trial_id)


@asynccontextmanager
async def named_store(arguments: Namespace) -> AsyncIterator[tuple[Store, ProxyConfig]]:
    """Opens an existing store. Raises ConfigurationError if there is none."""
    given = {} if arguments.store is None else {"store": arguments.store}
    config = load_config(arguments.config, **given)
    store = await open_store(config.store_url, create=False)
    try:
        yield store, config
    finally:
        await store.close()


def where(arguments: Namespace) -> SessionFilter:
    """The filters that the arguments of a command select."""
    return SessionFilter(
        status=SessionStatus(arguments.status) if arguments.status else None,
        kind=SessionKind(arguments.kind) if arguments.kind else None,
        id_prefix=arguments.prefix,
        marked=arguments.marked,
    )


def tags(given: list[str]) -> dict[str, str]:
    """The values of `--tag NAME=VALUE`.

    Raises:
        ConfigurationError: one of them has another form.
    """
    parts = [tag.partition("=") for tag in given]
    wrong = [name for name, separator, _ in parts if not (name and separator)]
    if wrong:
        raise ConfigurationError(f"--tag {wrong[0]}: give NAME=VALUE, like task_id=sum-17")
    return {name: value for name, _, value in parts}
