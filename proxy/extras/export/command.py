"""`agentic-proxy export`: writes recorded sessions in the format of a trainer.

It reads the store and needs no running proxy, but one may be running.
"""

from __future__ import annotations

import math
import sys
from argparse import Namespace
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from urllib.parse import quote

from proxy.commands.sessions import named_store, tags, where
from proxy.errors import ConfigurationError
from proxy.extras.export.files import write
from proxy.extras.export.private import without_secrets
from proxy.extras.export.protocol import ExportFormat, Row, Sample
from proxy.extras.export.registry import RECORDS, open_format
from proxy.extras.export.selection import ExportSelection, Filters
from proxy.records.binary import encode_record
from proxy.rendering.tokenizer import load_tokenizer
from proxy.settings.plugins import load_plugin


async def export_sessions(arguments: Namespace) -> int:
    """Writes the selected sessions and prints what was left out and why."""
    filters = _filters(arguments)
    async with named_store(arguments) as (store, config):
        for session_id in arguments.trial_id:
            if await store.get_session(session_id) is None:
                raise ConfigurationError(
                    f"session {session_id!r} is not in this store; `agentic-proxy sessions list`"
                    " prints all ids"
                )
        form = open_format("tokens" if arguments.format == RECORDS else arguments.format)
        selection = ExportSelection(store, filters, form)
        units = selection.units()
        if not arguments.with_secrets:
            model = arguments.model or config.model
            decode = None if model is None else load_tokenizer(model).decode
            units = without_secrets(units, form, decode, selection.left_out)
        if arguments.format == RECORDS:
            count, things = await _write_records(units, arguments.out), "sessions"
        else:
            rows = _rows(units, selection.left_out, form)
            count, things = await write(rows, form, arguments.out), "rows"
    print(f"{count} {things} in {arguments.out}")
    for reason, number in selection.left_out.items():
        print(f"left out: {number} {reason}", file=sys.stderr)
    return 0


Units = AsyncIterator[Sequence[Sample]]


async def _rows(units: Units, left_out: Counter[str], form: ExportFormat) -> AsyncIterator[Row]:
    async for unit in units:
        found = False
        for row in form.rows(unit):
            found = True
            yield row
        if not found:
            left_out[f"{form.unit}s with nothing to export in this format"] += 1


async def _write_records(units: Units, to: Path) -> int:
    count = 0
    try:
        to.mkdir(parents=True, exist_ok=True)
        async for (sample,) in units:
            count += 1
            name = quote(sample.session.session_id, safe="") + ".record"
            (to / name).write_bytes(encode_record(sample.session, list(sample.turns)))
    except OSError as error:
        raise ConfigurationError(f"--out: cannot write {to}: {error.strerror}") from error
    return count


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
