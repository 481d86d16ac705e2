"""The long SQL statements of the SQLite store."""

from __future__ import annotations

from proxy.store import rows

CREATE = (
    f"INSERT INTO sessions ({rows.SESSION_COLUMNS})"
    f" VALUES ({', '.join('?' * len(rows.SESSION_COLUMNS.split(',')))}) ON CONFLICT DO NOTHING"
)
ORIGIN = (
    "SELECT (SELECT session_id FROM sessions WHERE origin_session = s.session_id"
    " AND origin_salvages = 1) FROM sessions s WHERE session_id = ?"
)
BRANCHES = "SELECT count(*) FROM sessions WHERE origin_session = ?"
TURNS = (
    f"{rows.lineage(':id', least='min')} SELECT {rows.TURN_COLUMNS} FROM lineage l"
    f" JOIN turns t ON {rows.IN_LINEAGE}"
    " LEFT JOIN answers a ON a.session_id = t.session_id AND a.idx = t.idx"
    " WHERE t.idx >= :since AND t.idx < coalesce(:until, t.idx + 1) ORDER BY t.idx"
)
REPLAYED = (
    "SELECT d.idx FROM deliveries d JOIN sessions s ON s.session_id = d.session_id"
    " WHERE d.session_id = ? AND d.idx < s.origin_turn AND d.arrived = 1"
)
HELD_ELSEWHERE = (
    "SELECT o.number, o.address FROM turns t JOIN owners o ON o.number = t.owner"
    " LEFT JOIN answers a ON a.session_id = t.session_id AND a.idx = t.idx"
    " LEFT JOIN deliveries d ON d.session_id = t.session_id AND d.idx = t.idx"
    " WHERE t.session_id = ? AND t.owner <> ? AND o.address IS NOT NULL"
    " AND (a.idx IS NULL OR (a.status = 'done' AND d.idx IS NULL))"
)
UNDELIVERED = (
    "SELECT t.idx, t.owner, d.arrived FROM turns t"
    " JOIN answers a ON a.session_id = t.session_id AND a.idx = t.idx"
    " LEFT JOIN deliveries d ON d.session_id = t.session_id AND d.idx = t.idx"
    " WHERE t.session_id = ? AND a.status = 'done' AND coalesce(d.arrived, 0) = 0"
)
MARK = (
    "INSERT INTO deliveries (arrived, session_id, idx) SELECT ?, session_id, ? FROM sessions"
    " WHERE session_id = ? ON CONFLICT DO UPDATE SET arrived = excluded.arrived"
)
_ADD_REWARD = (
    f"INSERT INTO rewards ({rows.REWARD_COLUMNS}, session_id) SELECT ?, ?, ?, ?, ?, session_id"
    " FROM sessions WHERE session_id = ?"
)
ADD_REWARD = f"{_ADD_REWARD} ON CONFLICT DO NOTHING RETURNING 1"
SET_REWARD = f"{_ADD_REWARD} {rows.REPLACES_REWARD} RETURNING 1"
ADD_EVENT = (
    "INSERT INTO events (at, kind, data, session_id) SELECT ?, ?, ?, session_id"
    " FROM sessions WHERE session_id = ? RETURNING seq"
)
IS_SESSION = "SELECT 1 FROM sessions WHERE session_id = ?"
ENDED = (
    "SELECT session_id FROM sessions s WHERE coalesce(completed_at, expires_at) < ?"
    " AND NOT EXISTS (SELECT 1 FROM sessions WHERE origin_session = s.session_id)"
    " ORDER BY coalesce(completed_at, expires_at) LIMIT ?"
)
BEGIN = (
    f"INSERT INTO turns ({rows.INTENT_COLUMNS}, owner) SELECT {', '.join('?' * 14)} FROM sessions"
    " WHERE session_id = ? AND status = 'open'"
    " ON CONFLICT DO NOTHING"
)
COMMIT = (
    f"INSERT INTO answers ({rows.ANSWER_COLUMNS}, session_id, idx)"
    f" SELECT {', '.join('?' * 12)}, session_id, idx FROM turns WHERE session_id = ? AND idx = ?"
    " ON CONFLICT DO UPDATE SET "
    + ", ".join(f"{c.strip()} = excluded.{c.strip()}" for c in rows.ANSWER_COLUMNS.split(","))
    + f" WHERE {rows.MAY_COMMIT}"
)
SET_STATUS = (
    "INSERT INTO answers (session_id, idx, status, sampled_ids, logprobs, versions, answer_key,"
    " answer) SELECT session_id, idx, ?, x'', x'', x'', x'', x'' FROM turns"
    " WHERE session_id = ? AND idx = ?"
    " ON CONFLICT DO UPDATE SET status = excluded.status"
)
CUT = (
    "INSERT INTO answers (session_id, idx, status, sampled_ids, logprobs, versions, answer_key,"
    " answer) SELECT session_id, idx, 'cut', x'', x'', x'', x'', x'' FROM turns"
    " WHERE session_id = ? AND idx = ? AND owner = ?"
    " ON CONFLICT DO NOTHING"
)
ADD_IMAGE = f"INSERT INTO images ({rows.IMAGE_COLUMNS}) VALUES (?, ?, ?) ON CONFLICT DO NOTHING"
HAS_IMAGE = (
    "INSERT INTO session_images (session_id, sha256) SELECT session_id, ? FROM sessions"
    " WHERE session_id = ? ON CONFLICT DO UPDATE SET sha256 = excluded.sha256"
)
IMAGE = f"SELECT {rows.IMAGE_COLUMNS} FROM images WHERE sha256 = ?"
REMOVE_UNUSED_IMAGE = (
    "DELETE FROM images WHERE sha256 = ?"
    " AND NOT EXISTS (SELECT 1 FROM session_images s WHERE s.sha256 = images.sha256)"
)
IS_TURN = "SELECT 1 FROM turns WHERE session_id = ? AND idx = ?"
POLICIES = "SELECT name, version, adapter, run FROM policies"
PUBLISH = (
    "INSERT INTO policies (name, version, adapter, run) VALUES (?, ?, ?, ?)"
    " ON CONFLICT DO UPDATE SET"
    " version = excluded.version, adapter = excluded.adapter, run = excluded.run"
    " WHERE run IN ('', excluded.run)"
)
RELEASE = "UPDATE policies SET run = '' WHERE name = ? AND run = ?"
