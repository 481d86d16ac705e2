"""Writes rows to a file: JSON Lines, Parquet, or a folder that `datasets.load_from_disk` reads.

Invariant: rows are written as they come, in groups of ROWS_PER_GROUP; no export is held in memory.
"""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import orjson

from proxy.errors import ConfigurationError
from proxy.extras.export.images import as_arrow, as_json
from proxy.extras.export.protocol import ExportFormat, Row

ROWS_PER_GROUP = 256
"""Rows per Parquet row group; few, so that an export needs little memory."""


async def write(rows: AsyncIterator[Row], form: ExportFormat, to: Path) -> int:
    """Writes to `FILE.jsonl`, `FILE.parquet`, or a Hugging Face dataset in a folder of any other
    name. Returns the number of rows.

    Raises:
        ConfigurationError: `to` cannot be written, or a package is missing.
    """
    try:
        to.parent.mkdir(parents=True, exist_ok=True)
        if to.suffix == ".jsonl":
            return await _jsonl(rows, to)
        if to.suffix == ".parquet":
            return await _parquet(rows, form, to)
        if to.suffix or to.is_file():
            raise ConfigurationError(
                f"--out: {to} is neither FILE.jsonl, FILE.parquet nor the name of a folder (for a"
                " Hugging Face dataset)"
            )
        return await _dataset(rows, form, to)
    except OSError as error:
        raise ConfigurationError(f"--out: cannot write {to}: {error.strerror}") from error


async def _jsonl(rows: AsyncIterator[Row], to: Path) -> int:
    count = 0
    with to.open("wb") as file:
        async for row in rows:
            count += 1
            file.write(orjson.dumps(row, default=as_json) + b"\n")
    return count


async def _parquet(rows: AsyncIterator[Row], form: ExportFormat, to: Path) -> int:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise _missing("pyarrow", to) from error
    schema = form.schema(pa)
    texts = {field.name for field in schema if pa.types.is_string(field.type)}
    count = 0
    group: list[Row] = []
    with pq.ParquetWriter(to, schema) as writer:
        async for row in rows:
            count += 1
            cells = {name: _cell(value, name in texts) for name, value in row.items()}
            group.append(as_arrow(cells))
            if len(group) == ROWS_PER_GROUP:
                writer.write_table(pa.Table.from_pylist(group, schema=schema))
                group = []
        if group:
            writer.write_table(pa.Table.from_pylist(group, schema=schema))
    return count


async def _dataset(rows: AsyncIterator[Row], form: ExportFormat, to: Path) -> int:
    try:
        from datasets import Dataset, disable_progress_bars
    except ImportError as error:
        raise _missing("datasets", to) from error
    disable_progress_bars()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.parquet"
        count = await _parquet(rows, form, file)
        Dataset.from_parquet(str(file), cache_dir=folder).save_to_disk(str(to))
    return count


def _cell(value: Any, is_text: bool) -> Any:
    if is_text and value is not None and not isinstance(value, str):
        return orjson.dumps(value, default=as_json).decode()
    return value


def _missing(package: str, to: Path) -> ConfigurationError:
    return ConfigurationError(
        f"--out {to} needs the package {package}; run `pip install {package}`, or write FILE.jsonl"
    )
