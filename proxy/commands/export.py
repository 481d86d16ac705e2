"""Recorded sessions as files: JSON Lines or Parquet with one trajectory per row, or the compact
binary form with one file per session.

A row is a path from a root to a turn that no other turn continues in full: `ids`, `sampled` and
`logprobs` per id, the `turns` on the path, and the session's rewards. Over all rows of a session
each sampled token is marked exactly once.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import orjson

from proxy.commands.arguments import Format
from proxy.control.record_view import session_view, trajectories_view
from proxy.errors import ConfigurationError
from proxy.record_format import encode_record
from proxy.records import Session, Turn

ROWS_PER_GROUP = 256
"""Rows per Parquet row group; few, so that an export needs little memory."""

Records = AsyncIterator[tuple[Session, list[Turn]]]


async def export(records: Records, to: Path, kind: Format) -> int:
    """Writes the sessions and returns their number.

    Raises ConfigurationError if `to` cannot be written or pyarrow is missing.
    """
    writers = {"jsonl": _jsonl, "parquet": _parquet, "binary": _binary}
    try:
        return await writers[kind](records, to)
    except OSError as error:
        raise ConfigurationError(f"--out: cannot write {to}: {error.strerror}") from error


async def _jsonl(records: Records, to: Path) -> int:
    sessions = 0
    with to.open("wb") as file:
        async for session, turns in records:
            sessions += 1
            for row in _rows(session, turns):
                file.write(orjson.dumps(row, option=orjson.OPT_SERIALIZE_NUMPY) + b"\n")
    return sessions


async def _parquet(records: Records, to: Path) -> int:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise ConfigurationError(
            "--format parquet needs the package pyarrow; run `pip install pyarrow`"
        ) from error
    schema = pa.schema(
        [
            ("trial_id", pa.string()),
            ("kind", pa.string()),
            ("rewards", pa.string()),
            ("metadata", pa.string()),
            ("turns", pa.list_(pa.int32())),
            ("ids", pa.list_(pa.int32())),
            ("sampled", pa.list_(pa.bool_())),
            ("logprobs", pa.list_(pa.float32())),
        ]
    )
    sessions, rows = 0, []
    with pq.ParquetWriter(to, schema) as writer:
        async for session, turns in records:
            sessions += 1
            rows += [_flat(row) for row in _rows(session, turns)]
            if len(rows) >= ROWS_PER_GROUP:
                writer.write_table(pa.Table.from_pylist(rows, schema=schema))
                rows = []
        if rows:
            writer.write_table(pa.Table.from_pylist(rows, schema=schema))
    return sessions


async def _binary(records: Records, to: Path) -> int:
    to.mkdir(parents=True, exist_ok=True)
    sessions = 0
    async for session, turns in records:
        sessions += 1
        name = quote(session.session_id, safe="") + ".record"
        (to / name).write_bytes(encode_record(session, turns))
    return sessions


def _rows(session: Session, turns: list[Turn]) -> Iterator[dict[str, Any]]:
    view = session_view(session)
    head = {name: view[name] for name in ("trial_id", "kind", "rewards", "metadata")}
    for trajectory in trajectories_view(turns):
        yield {**head, **trajectory}


def _flat(row: dict[str, Any]) -> dict[str, Any]:
    """The row with objects as JSON text, which every Parquet reader can handle."""
    texts = {name: orjson.dumps(row[name]).decode() for name in ("rewards", "metadata")}
    return {**row, **texts}
