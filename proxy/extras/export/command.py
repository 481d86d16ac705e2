"""`agentic-proxy export`: writes recorded sessions in the format of a trainer.

It reads the store and needs no running proxy, but one may be running; with `--url` it asks one.
"""

from __future__ import annotations

import math
import sys
from argparse import Namespace
from hashlib import sha256
from pathlib import Path
from urllib.parse import quote

from proxy.commands.sessions import opened, tags, where
from proxy.errors import ConfigurationError
from proxy.extras.export.files import write
from proxy.extras.export.protocol import ImagesFound
from proxy.extras.export.registry import RECORDS, open_format
from proxy.extras.export.rows import Rows, Units
from proxy.extras.export.selection import ExportSelection, Filters
from proxy.records.binary import encode_record
from proxy.rendering.tokenizer import load_tokenizer
from proxy.settings.plugins import load_plugin

MAX_NAME_CHARS = 200
"""Of a record's file; an id may have 256 characters, which three bytes each may stand for."""


async def export_sessions(arguments: Namespace) -> int:
    """Writes the selected sessions and prints what was left out and why."""
    filters = _filters(arguments)
    async with opened(arguments) as (store, config):
        for session_id in arguments.trial_id:
            if await store.get_session(session_id) is None:
                raise ConfigurationError(
                    f"session {session_id!r} is not in this store; `agentic-proxy sessions list`"
                    " lists them"
                )
        form = open_format("tokens" if arguments.format == RECORDS else arguments.format)
        selection = ExportSelection(store, filters, form)
        model = arguments.model or config.model
        hides = not arguments.with_secrets
        decode = load_tokenizer(model).decode if hides and model is not None else None

        rows = Rows(selection, form, store, decode=decode, hides=hides)
        if arguments.format == RECORDS:
            count, things = await _write_records(rows.units(), arguments.out), "sessions"
        else:
            try:
                count = await write(aiter(rows), form, arguments.out)
            except ImagesFound:
                count = await write(aiter(rows), form, arguments.out)
            things = "rows"
    print(f"{count} {things} in {arguments.out}")
    for reason, number in selection.left_out.items():
        print(f"left out: {number} {reason}", file=sys.stderr)
    return 0


async def _write_records(units: Units, to: Path) -> int:
    count = 0
    try:
        to.mkdir(parents=True, exist_ok=True)
        async for (sample,) in units:
            count += 1
            (to / _file_name(sample.session.session_id)).write_bytes(
                encode_record(sample.session, list(sample.turns))
            )
            for digest, image in sample.images.items():
                (to / f"{digest}.image").write_bytes(image.data)
    except OSError as error:
        raise ConfigurationError(f"--out: cannot write {to}: {error.strerror}") from error
    return count


def _file_name(session_id: str) -> str:
    """Of its record, which has the id."""
    name = quote(session_id, safe="")
    if len(name) > MAX_NAME_CHARS:
        name = f"{name[:MAX_NAME_CHARS]}-{sha256(session_id.encode()).hexdigest()[:16]}"
    return name + ".record"


def _filters(arguments: Namespace) -> Filters:
    predicate = None
    if arguments.where is not None:
        predicate = load_plugin("--where", arguments.where, {})
    return Filters(
        where(arguments),
        tuple(arguments.trial_id),
        tags(arguments.tag),
        arguments.reward,
        -math.inf if arguments.min_reward is None else arguments.min_reward,
        math.inf if arguments.max_reward is None else arguments.max_reward,
        predicate,
    )
