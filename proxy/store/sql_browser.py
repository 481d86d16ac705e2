"""The queries of `browser`, which are the same for SQLite and PostgreSQL."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import accumulate, takewhile
from typing import Any

import numpy as np
import orjson

from proxy.records import (
    FinishReason,
    ForkCause,
    Mark,
    RecordedImage,
    Turn,
    TurnStatus,
    VersionSpan,
)
from proxy.store import rows
from proxy.store.browser import (
    Grant,
    GrantKind,
    Position,
    Recent,
    SavedRule,
    SessionPage,
    SessionSummary,
    TurnHead,
    WrittenTurn,
)

_JOINED = "turns t LEFT JOIN answers a ON a.session_id = t.session_id AND a.idx = t.idx"
_IN_SESSION = (
    f"lineage l JOIN turns t ON {rows.IN_LINEAGE}"
    " LEFT JOIN answers a ON a.session_id = t.session_id AND a.idx = t.idx"
)
"""The turns of the session that `rows.lineage` selects, with those that a branch refers to."""
_HEAD_COLUMNS = (
    "t.session_id, t.idx, t.parent, t.shared_tokens, t.fork_cause, t.dialect, t.agent_id,"
    " t.started_at, length(t.prompt_ids), substr(t.request, 1, 32), a.status, a.finish_reason,"
    " a.versions, a.first_token_s, a.duration_s, length(a.sampled_ids),"
    " a.engine"
)
_AFTER = re.compile(rb'\{"(after|same_as)":(\d+)')
_TOKEN_BYTES = 4
MAX_MARKS = 500
"""Parameters of one statement; both databases accept more."""


class SqlBrowser:
    """Implements `Browser` on any database that the two methods of a subclass read and change."""

    LEAST = "least"
    """The database's function for the smaller of two numbers."""
    LOCKED = ""
    """Ends the query of a session whose removal is to wait for what is added to it."""
    COMMITTED = "? IS NULL"
    """Whether a row of the table `{}` was written before the transaction `_oldest_running`."""

    async def _oldest_running(self) -> str | None:
        """The oldest transaction that writes; None: no row comes before one that is there."""
        return None

    async def _fetch(self, sql: str, *values: Any) -> Sequence[Any]:
        raise NotImplementedError

    async def _change(self, sql: str, *values: Any) -> Sequence[Any]:
        """The rows that a statement returns once it is committed."""
        raise NotImplementedError

    async def sessions(self, page: SessionPage) -> list[SessionSummary]:
        clauses, values = ["TRUE"], list[Any]()
        if page.before is not None:
            clauses.append("(created_at, session_id) < (?, ?)")
            values += page.before
        if page.id_prefix:
            clauses.append("session_id >= ? AND session_id < ?")
            values += [page.id_prefix, page.id_prefix + "\U0010ffff"]
        if page.marked is not None:
            clauses.append(f"session_id IN (SELECT session_id FROM marks WHERE {rows.OF_RULE})")
            values += [page.marked, page.marked]
        for column, value in (("status", page.status), ("kind", page.kind)):
            if value is not None:
                clauses.append(f"{column} = ?")
                values.append(value.value)
        order = " ORDER BY created_at DESC, session_id DESC LIMIT ?"
        return await self._summaries(" AND ".join(clauses) + order, *values, page.limit)

    async def session(self, session_id: str) -> SessionSummary | None:
        return next(iter(await self._summaries("session_id = ?", session_id)), None)

    async def created_at(self, session_id: str) -> float | None:
        sql = "SELECT created_at FROM sessions WHERE session_id = ?"
        return next((float(at) for (at,) in await self._fetch(sql, session_id)), None)

    async def _summaries(self, clause: str, *values: Any) -> list[SessionSummary]:
        sql = f"SELECT {rows.SESSION_COLUMNS} FROM sessions WHERE {clause}"
        found = {
            row[0]: SessionSummary(rows.session_from_row(row, []))
            for row in await self._fetch(sql, *values)
        }
        if not found:
            return []
        marks = _marks(found)
        for session_id, *reward in await self._fetch(
            f"SELECT session_id, {rows.REWARD_COLUMNS} FROM rewards WHERE session_id IN ({marks})"
            f" ORDER BY seq",
            *found,
        ):
            found[session_id].session.rewards.append(rows.reward_from_row(reward))
        for session_id, of_session in (await self.marks(list(found))).items():
            found[session_id].session.marks.extend(of_session)
        for session_id, cause, *numbers in await self._fetch(
            "SELECT t.session_id, t.fork_cause, count(*), count(*) - count(a.idx),"
            " count(CASE WHEN a.status = 'cut' THEN 1 END),"
            " sum(coalesce(length(a.sampled_ids), 0)),"
            " max(t.shared_tokens * 4 + length(t.prompt_ids) + coalesce(length(a.sampled_ids), 0)),"
            f" max(t.started_at + coalesce(a.duration_s, 0)) FROM {_JOINED}"
            f" WHERE t.session_id IN ({marks}) GROUP BY t.session_id, t.fork_cause",
            *found,
        ):
            _add(found[session_id], cause, *numbers)
        return list(found.values())

    async def heads(self, session_id: str, since: int, limit: int) -> list[TurnHead]:
        sql = (
            f"{rows.lineage('?', least=self.LEAST)} SELECT {_HEAD_COLUMNS} FROM {_IN_SESSION}"
            " WHERE t.idx >= ? ORDER BY t.idx LIMIT ?"
        )
        return [_head(row) for row in await self._fetch(sql, session_id, since, limit)]

    async def turns(self, session_id: str, indexes: Sequence[int]) -> list[Turn]:
        found = []
        for at in range(0, len(indexes), MAX_MARKS):
            batch = indexes[at : at + MAX_MARKS]
            sql = (
                f"{rows.lineage('?', least=self.LEAST)} SELECT {rows.TURN_COLUMNS}"
                f" FROM {_IN_SESSION} WHERE t.idx IN ({_marks(batch)}) ORDER BY t.idx"
            )
            for row in await self._fetch(sql, session_id, *batch):
                turn = rows.turn_from_row(row)
                found.append(rows.read_in_session(turn, trained=bool(row[-1])))
        return sorted(found, key=lambda turn: turn.index)

    async def image(self, session_id: str, sha256: str) -> RecordedImage | None:
        sql = (
            f"{rows.lineage('?', least=self.LEAST)} SELECT t.images FROM {_IN_SESSION}"
            " WHERE t.images IS NOT NULL"
        )
        cells = await self._fetch(sql, session_id)
        if not any(i.sha256 == sha256 for (cell,) in cells for i in rows.spans_from_cell(cell)):
            return None
        sql = f"SELECT {rows.IMAGE_COLUMNS} FROM images WHERE sha256 = ?"
        found = await self._fetch(sql, sha256)
        return rows.image_from_row(found[0]) if found else None

    async def requests(self, session_id: str, first: int, until: int) -> list[bytes]:
        sql = (
            f"{rows.lineage('?', least=self.LEAST)} SELECT t.request FROM {_IN_SESSION}"
            " WHERE t.idx >= ? AND t.idx < ? ORDER BY t.idx"
        )
        found = await self._fetch(sql, session_id, first, until)
        return [bytes(request or b"") for (request,) in found]

    async def last_events(self, session_ids: Sequence[str], kind: str) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = {}
        if session_ids:
            sql = (
                "SELECT session_id, data FROM events WHERE kind = ?"
                f" AND session_id IN ({_marks(session_ids)}) ORDER BY seq"
            )
            for session_id, data in await self._fetch(sql, kind, *session_ids):
                found[session_id] = orjson.loads(data)
        return found

    async def forks(self, cause: ForkCause, before: float, limit: int) -> list[TurnHead]:
        sql = (
            f"SELECT {_HEAD_COLUMNS} FROM {_JOINED} WHERE t.fork_cause = ? AND t.started_at < ?"
            " ORDER BY t.started_at DESC LIMIT ?"
        )
        return [_head(row) for row in await self._fetch(sql, cause.value, before, limit)]

    async def written(self, before: int, limit: int, max_bytes: int) -> list[WrittenTurn]:
        sizes = await self._fetch(
            f"SELECT t.seq, coalesce(length(t.request), 0) + coalesce(length(a.answer), 0)"
            f" FROM {_JOINED} WHERE t.seq < ? ORDER BY t.seq DESC LIMIT ?",
            before,
            limit,
        )
        totals = accumulate(size for _, size in sizes)
        read = [place for (place, _), total in zip(sizes, totals, strict=True) if total < max_bytes]
        first = read[-1] if read else next(iter(sizes), [before])[0]
        found = await self._fetch(
            f"SELECT t.seq, t.session_id, t.idx, t.fork_cause, t.agent_id, t.started_at,"
            f" t.request, a.answer FROM {_JOINED} WHERE t.seq >= ? AND t.seq < ?"
            f" ORDER BY t.seq DESC",
            first,
            before,
        )
        return [
            WrittenTurn(
                place=row[0],
                session_id=row[1],
                index=row[2],
                fork_cause=ForkCause(row[3]) if row[3] else None,
                agent_id=row[4],
                started_at=row[5],
                request=bytes(row[6] or b""),
                answer=bytes(row[7] or b""),
            )
            for row in found
        ]

    async def recent(self, after: Position | None, limit: int) -> Recent:
        if after is None or not await self._may_be_of_this_store(after):
            after = await self._back(limit)
        running = await self._oldest_running()
        begun = await self._begun(after.begun, limit, running)
        answers = (
            f"{_HEAD_COLUMNS}, a.seq",
            "answers a JOIN turns t ON a.session_id = t.session_id AND a.idx = t.idx",
        )
        answered = await self._committed(*answers, "a.seq", after.answered, limit, running)
        columns = "e.session_id, e.seq, e.at, e.kind, e.data"
        events = await self._committed(columns, "events e", "e.seq", after.events, limit, running)
        position = Position(
            begun[-1][0] if begun else after.begun,
            answered[-1][-1] if answered else after.answered,
            events[-1][1] if events else after.events,
        )
        told = [
            {**orjson.loads(row[4]), "session_id": row[0], "seq": row[1], "at": row[2]}
            | {"kind": row[3]}
            for row in events
        ]
        return Recent(position, [head for _, head in begun], [_head(r) for r in answered], told)

    async def _may_be_of_this_store(self, position: Position) -> bool:
        """False for a position after the store's end: another store was there before."""
        return True

    async def begun(self, after: int, limit: int) -> list[tuple[int, TurnHead]]:
        return await self._begun(after, limit, await self._oldest_running())

    async def _begun(
        self, after: int, limit: int, running: str | None
    ) -> list[tuple[int, TurnHead]]:
        place = "t.seq"
        found = await self._committed(
            f"{_HEAD_COLUMNS}, {place}", _JOINED, place, after, limit, running
        )
        return [(row[-1], _head(row)) for row in found]

    async def _committed(
        self, columns: str, source: str, place: str, after: int, limit: int, running: str | None
    ) -> list[Any]:
        """The rows of `source` after a place, up to the first before which a row may still come.
        `running` is the result of `_oldest_running`, from before this call."""
        table = place.partition(".")[0]
        found = await self._fetch(
            f"SELECT {columns}, {self.COMMITTED.format(table)} FROM {source} WHERE {place} > ?"
            f" ORDER BY {place} LIMIT ?",
            running,
            after,
            limit,
        )
        return [row[:-1] for row in takewhile(lambda row: row[-1], found)]

    async def _back(self, count: int) -> Position:
        """The position before the last `count` rows of each table."""
        ends = [
            (await self._fetch(f"SELECT coalesce(max(seq), 0) FROM {table}"))[0][0]
            for table in ("turns", "answers", "events")
        ]
        return Position(*(max(0, end - count) for end in ends))

    async def add_mark(self, session_id: str, mark: Mark) -> bool:
        added = await self._change(
            f"INSERT INTO marks (session_id, {rows.MARK_COLUMNS}) SELECT session_id,"
            " CAST(? AS TEXT), CAST(? AS TEXT), CAST(? AS INTEGER), CAST(? AS DOUBLE PRECISION),"
            f" CAST(? AS TEXT) FROM sessions WHERE session_id = ?{self.LOCKED}"
            " ON CONFLICT DO NOTHING RETURNING rule",
            mark.rule,
            mark.action.value,
            mark.turn,
            mark.at,
            mark.found,
            session_id,
        )
        return bool(added)

    async def marks(self, session_ids: Sequence[str]) -> dict[str, list[Mark]]:
        found: dict[str, list[Mark]] = {}
        if session_ids:
            sql = (
                f"SELECT session_id, {rows.MARK_COLUMNS} FROM marks"
                f" WHERE session_id IN ({_marks(session_ids)}) ORDER BY at"
            )
            for session_id, *mark in await self._fetch(sql, *session_ids):
                found.setdefault(session_id, []).append(rows.mark_from_row(mark))
        return found

    async def saved_rules(self) -> list[SavedRule]:
        found = await self._fetch("SELECT name, query, created_at FROM search_rules ORDER BY name")
        return [SavedRule(name, bytes(query), at) for name, query, at in found]

    async def save_rule(self, rule: SavedRule) -> bool:
        sql = (
            "INSERT INTO search_rules (name, query, created_at) VALUES (?, ?, ?)"
            " ON CONFLICT DO NOTHING RETURNING name"
        )
        return bool(await self._change(sql, rule.name, rule.query, rule.created_at))

    async def remove_rule(self, name: str) -> bool:
        sql = "DELETE FROM search_rules WHERE name = ? RETURNING name"
        return bool(await self._change(sql, name))

    async def add_grant(self, grant: Grant) -> None:
        await self._change(
            "INSERT INTO view_grants (digest, kind, name, created_at, expires_at)"
            " VALUES (?, ?, ?, ?, ?) RETURNING name",
            grant.digest,
            grant.kind.value,
            grant.name,
            grant.created_at,
            grant.expires_at,
        )

    async def find_grant(self, digest: bytes) -> Grant | None:
        return _grant(await self._fetch(f"{_GRANTS} WHERE digest = ?", digest))

    async def take_grant(self, digest: bytes) -> Grant | None:
        sql = f"DELETE FROM view_grants WHERE digest = ? RETURNING {_GRANT_COLUMNS}"
        return _grant(await self._change(sql, digest))

    async def grants(self, kind: GrantKind) -> list[Grant]:
        found = await self._fetch(f"{_GRANTS} WHERE kind = ? ORDER BY created_at", kind.value)
        return [grant for row in found if (grant := _grant([row])) is not None]

    async def revoke_grants(self, name: str) -> int:
        sql = "DELETE FROM view_grants WHERE name = ? RETURNING name"
        return len(await self._change(sql, name))


_GRANT_COLUMNS = "digest, kind, name, created_at, expires_at"
_GRANTS = f"SELECT {_GRANT_COLUMNS} FROM view_grants"


def _grant(found: Sequence[Any]) -> Grant | None:
    for row in found:
        return Grant(bytes(row[0]), GrantKind(row[1]), row[2], row[3], row[4])
    return None


def _marks(values: Iterable[Any]) -> str:
    return ", ".join("?" for _ in values)


def _add(
    summary: SessionSummary,
    cause: str | None,
    turns: int,
    running: int,
    cut: int,
    sampled_bytes: int,
    path_bytes: int,
    last_at: float,
) -> None:
    """Adds the numbers of the session's turns with one fork cause, or with none."""
    summary.turns += turns
    summary.running += running
    summary.cut += cut
    summary.sampled_tokens += int(sampled_bytes) // _TOKEN_BYTES
    summary.longest_path = max(summary.longest_path, int(path_bytes) // _TOKEN_BYTES)
    summary.last_at = max(summary.last_at or 0.0, last_at)
    if cause is not None:
        summary.forks[cause] = turns


def _head(row: Sequence[Any]) -> TurnHead:
    found = _AFTER.match(bytes(row[9] or b""))
    before = None if found is None else int(found[2])
    repeats = found is not None and found[1] == b"same_as"
    spans = np.frombuffer(row[12] or b"", "<i4").reshape(-1, 3).tolist()
    return TurnHead(
        session_id=row[0],
        index=row[1],
        parent=row[2],
        shared_tokens=row[3],
        fork_cause=ForkCause(row[4]) if row[4] else None,
        dialect=row[5],
        agent_id=row[6],
        started_at=row[7],
        new_tokens=row[8] // _TOKEN_BYTES,
        after=None if repeats else before,
        same_as=before if repeats else None,
        status=TurnStatus.OPEN if row[10] is None else TurnStatus(row[10]),
        finish_reason=FinishReason(row[11]) if row[11] else None,
        versions=tuple(VersionSpan(*span) for span in spans),
        first_token_s=row[13],
        duration_s=row[14],
        sampled_tokens=(row[15] or 0) // _TOKEN_BYTES,
        engine=row[16] or "",
    )
