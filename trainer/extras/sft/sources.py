"""Where recorded sessions are read: a store, a running proxy, or a folder."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol
from urllib.parse import unquote

from proxy.client import ProxyClient
from proxy.extras.export.images import ImageSource
from proxy.extras.export.selection import RecordSource
from proxy.records import RecordedImage, Session, Turn
from proxy.records.binary import RecordFormatError, decode_record
from proxy.store import open_store
from proxy.store.protocol import SessionFilter
from trainer.errors import ConfigError

RECORD = ".record"
STORE_FILE = "sessions.db"
"""The store in the folder of a run, of `collect` and of `eval`."""


class SftSource(RecordSource, ImageSource, Protocol):
    """Sessions, their turns and their images."""


@asynccontextmanager
async def open_source(name: str) -> AsyncIterator[SftSource]:
    """Opens one entry of `sft.sessions`; nothing is created or changed.

    Raises:
        ConfigError: there are no recorded sessions at that place.
        ConfigurationError: the store cannot be opened.
    """
    if name.startswith(("http://", "https://")):
        async with ProxyClient(name) as proxy:
            yield ProxyRecords(proxy)
        return
    folder = Path(name)
    if "://" not in name and folder.is_dir():
        if not (folder / STORE_FILE).is_file():
            yield RecordFolder(folder, _names(folder))
            return
        name = str(folder / STORE_FILE)
    store = await open_store(name, create=False)
    try:
        yield store
    finally:
        await store.close()


def _names(folder: Path) -> dict[str, Path]:
    files = {unquote(file.name.removesuffix(RECORD)): file for file in folder.glob(f"*{RECORD}")}
    if not files:
        raise ConfigError(
            f"sft.sessions: {folder} has neither {STORE_FILE} nor a *{RECORD} file; give the folder"
            " of `agentic-train collect`, or of `agentic-proxy export --format records`"
        )
    return dict(sorted(files.items()))


@dataclass(frozen=True, slots=True)
class RecordFolder:
    """The files that `agentic-proxy export --format records` wrote."""

    folder: Path

    files: Mapping[str, Path]
    """Session id → file, in the order of the ids."""

    async def list_sessions(self, where: SessionFilter) -> list[Session]:
        found: list[Session] = []
        for session_id in self.files:
            if where.after is not None and session_id <= where.after:
                continue
            session, _ = self._read(session_id)
            if _is_wanted(session, where):
                found.append(session)
            if len(found) == where.limit:
                break
        return found

    async def get_session(self, session_id: str) -> Session | None:
        return self._read(session_id)[0] if session_id in self.files else None

    async def get_turns(self, session_id: str) -> list[Turn]:
        return self._read(session_id)[1]

    async def get_image(self, sha256: str) -> RecordedImage | None:
        file = self.folder / f"{sha256}.image"
        return read_image(sha256, file.read_bytes()) if file.is_file() else None

    def _read(self, session_id: str) -> tuple[Session, list[Turn]]:
        file = self.files[session_id]
        try:
            return decode_record(file.read_bytes())
        except (OSError, RecordFormatError) as error:
            raise ConfigError(f"sft.sessions: {file} cannot be read: {error}") from error


@dataclass(frozen=True, slots=True)
class ProxyRecords:
    """The sessions of a running proxy."""

    proxy: ProxyClient
    _sessions: dict[str, str] = field(default_factory=dict)
    """Of an image, a session that has it."""

    async def list_sessions(self, where: SessionFilter) -> list[Session]:
        query: dict[str, str | int] = {"limit": where.limit}
        if where.kind is not None:
            query["kind"] = where.kind.value
        if where.after is not None:
            query["after"] = where.after
        views = await self.proxy.list_sessions(**query)
        return [(await self.proxy.get_turns(view["trial_id"]))[0] for view in views]

    async def get_session(self, session_id: str) -> Session | None:
        return (await self.proxy.get_turns(session_id))[0]

    async def get_turns(self, session_id: str) -> list[Turn]:
        turns = (await self.proxy.get_turns(session_id))[1]
        named = {image.sha256: session_id for turn in turns for image in turn.images}
        self._sessions.update(named)
        return turns

    async def get_image(self, sha256: str) -> RecordedImage | None:
        return read_image(sha256, await self.proxy.image(self._sessions[sha256], sha256))


def read_image(sha256: str, data: bytes) -> RecordedImage:
    """Raises ConfigError: these are other bytes."""
    if hashlib.sha256(data).hexdigest() != sha256:
        raise ConfigError(f"sft.sessions: image {sha256} has other bytes than were recorded")
    return RecordedImage(sha256, "", data)


def _is_wanted(session: Session, where: SessionFilter) -> bool:
    right_kind = where.kind is None or session.kind is where.kind
    right_status = where.status is None or session.status is where.status
    return right_kind and right_status
