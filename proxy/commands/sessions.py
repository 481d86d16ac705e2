"""`agentic-proxy sessions list|show|rate|tag|delete`: reads the record from the store, or with
`--url` from a proxy.

Without `--url` it needs no running proxy, but one may be running. Invariant: it never creates a
store.
"""

from __future__ import annotations

import math
import shlex
import sys
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
from proxy.commands.remote_sessions import RemoteSessions, remote_sessions
from proxy.commands.removal import remove
from proxy.commands.terminal import one_line, visible
from proxy.config import ProxyConfig, load_config
from proxy.conversation.first_words import first_words
from proxy.conversation.messages import load_answer
from proxy.errors import ConfigurationError, RequestError, SessionError
from proxy.records import FOLDER, GIT_BRANCH, REFUSED, Session, SessionKind, SessionStatus, Turn
from proxy.records.images import decoded
from proxy.rendering.tokenizer import Tokenizer, load_tokenizer
from proxy.search.record import LAST_PLACE, search
from proxy.search.terms import HitJson, SearchTerms
from proxy.store import open_store
from proxy.store.curation import RATING, THUMBS, keep
from proxy.store.protocol import SessionFilter, Store

COLUMNS = (
    *("trial", "kind", "status", "turns", "forks", "sampled", "rewards", "marks"),
    *("lasted", "folder", "branch", "asked"),
)
FOUND = "found"
"""The column of a search."""
WIDEST = 100_000
ON_A_TERMINAL = 50
"""Sessions that a person can look through; a run has a thousand."""
PAGE = 100
"""Sessions read from the store at a time."""
AROUND_CHARS = 30
"""Of the text before and after what a search found."""
_INDENT = "  "


async def list_sessions(arguments: Namespace) -> int:
    """Prints one line per session, and on a terminal only the last ones."""
    terms = None if arguments.search is None else _terms(arguments.search)
    table = Table(*COLUMNS, *([FOUND] if terms else []), box=None, pad_edge=False)
    last: int | None = ON_A_TERMINAL if sys.stdout.isatty() else None
    if arguments.last is not None and (last := arguments.last) < 1:
        raise ConfigurationError(f"--last {last}: give a number of at least 1")
    async with opened(arguments) as (store, _):
        hits = {} if terms is None else await _newest_hits(store, terms, arguments.search)
        found = [
            session
            async for session in _sessions(store, where(arguments))
            if terms is None or session.session_id in hits
        ]
        shown = found if last is None else _last(found, last)
        for session in shown:
            turns = await store.get_turns(session.session_id)
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
                *([_place(hits[session.session_id])] if terms else []),
            )
            table.add_row(*(Text(one_line(cell)) for cell in row))
    # No column is cut, whatever the terminal's width: ids are copied.
    Console(soft_wrap=True, width=Console(width=WIDEST).measure(table).maximum).print(table)
    if left := len(found) - len(shown):
        print(f"{left} older sessions: --last {len(found)}", file=sys.stderr)
    return 0


def _terms(text: str) -> SearchTerms:
    if not text:
        raise ConfigurationError("--search: give the words to search for")
    try:
        return SearchTerms.of(text)
    except RequestError as error:
        raise ConfigurationError(f"--search: {error}") from error


async def _newest_hits(
    store: Store | RemoteSessions, terms: SearchTerms, text: str
) -> dict[str, HitJson]:
    """By session, its last turn in which the words are."""
    hits: dict[str, HitJson] = {}
    before: int | None = LAST_PLACE
    while before is not None:
        if isinstance(store, RemoteSessions):
            found, before = await store.search(text, before)
        else:
            found, _, before = await search(store.browser, terms, before)
        for hit in found:
            hits.setdefault(hit["session"], hit)
    return hits


def _place(hit: HitJson) -> str:
    match = hit["matches"][0]
    before, after = match["before"][-AROUND_CHARS:], match["after"][:AROUND_CHARS]
    return f"turn {hit['index']}, {match['role']}: …{before}{match['match']}{after}…"


async def show_session(arguments: Namespace) -> int:
    """Prints a session's turns: the prompt, the answer, and the cause of each fork."""
    async with opened(arguments) as (store, config):
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
        if event["kind"] == REFUSED:
            console.print(f"refused with {event['status']}: {visible(event['message'])}")
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
    async with opened(arguments) as (store, _):
        try:
            if isinstance(store, RemoteSessions):
                await store.keep(arguments.trial_id, **said)
            else:
                await keep(store, arguments.trial_id, **said)
        except (ValueError, SessionError) as error:
            raise ConfigurationError(str(error)) from error


async def delete_session(arguments: Namespace) -> int:
    """Removes a session with its turns, rewards and events; an open one at its proxy, which ends
    it."""
    async with opened(arguments) as (store, config):
        try:
            if isinstance(store, RemoteSessions):
                await store.remove(arguments.trial_id)
            else:
                await remove(store, config, arguments.trial_id)
        except SessionError as error:
            word = shlex.quote(arguments.trial_id)
            again = (
                f"; give its address: agentic-proxy sessions delete {word} --url http://HOST:PORT"
                f"{options(arguments)}"
            )
            raise ConfigurationError(f"{error}{again if error.status == 503 else ''}") from error
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


def _last(sessions: list[Session], count: int) -> list[Session]:
    """Those that were created last, in the order of the list."""
    newest = sorted(sessions, key=lambda session: session.created_at)[-count:]
    chosen = {session.session_id for session in newest}
    return [session for session in sessions if session.session_id in chosen]


async def _sessions(store: Store | RemoteSessions, wanted: SessionFilter) -> AsyncIterator[Session]:
    after: str | None = None
    while True:
        page = await store.list_sessions(replace(wanted, after=after, limit=PAGE))
        for session in page:
            yield session
        if len(page) < PAGE:
            return
        after = page[-1].session_id


async def one_session(store: Store | RemoteSessions, trial_id: str) -> tuple[Session, list[Turn]]:
    session = await store.get_session(trial_id)
    if session is None:
        raise ConfigurationError(
            f"session {trial_id!r} is not in this store; `agentic-proxy sessions list` lists them"
        )
    return session, await store.get_turns(trial_id)


@asynccontextmanager
async def opened(
    arguments: Namespace,
) -> AsyncIterator[tuple[Store | RemoteSessions, ProxyConfig]]:
    """The store, or the proxy at `--url`. Raises ConfigurationError: it cannot be reached."""
    if arguments.url is None:
        async with named_store(arguments) as found:
            yield found
        return
    config = _configuration(arguments)  # its key may be next to the store
    async with remote_sessions(arguments.url, config) as sessions:
        yield sessions, config


@asynccontextmanager
async def named_store(arguments: Namespace) -> AsyncIterator[tuple[Store, ProxyConfig]]:
    """Opens an existing store. Raises ConfigurationError if there is none."""
    config = _configuration(arguments)
    store = await open_store(config.store_url, create=False)
    try:
        yield store, config
    finally:
        await store.close()


def options(arguments: Namespace) -> str:
    """The options with which another command finds the store that was given."""
    given = ((name, getattr(arguments, name)) for name in ("config", "store"))
    return "".join(f" --{name} {shlex.quote(str(value))}" for name, value in given if value)


def _configuration(arguments: Namespace) -> ProxyConfig:
    given = {} if arguments.store is None else {"store": arguments.store}
    return load_config(arguments.config, **given)


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
