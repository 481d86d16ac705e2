"""The long SQL statements of the PostgreSQL store."""

from __future__ import annotations

from proxy.store import rows

INTENT = (
    "$1::text, $2::int, $3::int, $4::int, $5::text, $6::bytea, $7::bytea, $8::bytea, $9::text,"
    " $10::text, $11::double precision, $12::bytea, $13::bytea, $14::int"
)
ANSWER = (
    "$1::text, $2::int, $3::text, $4::bytea, $5::bytea, $6::bytea, $7::text, $8::bytea, $9::bytea,"
    " $10::double precision, $11::double precision, $12::text, $13::bytea, $14::bytea"
)
ANSWER_NAMES = [name.strip() for name in rows.ANSWER_COLUMNS.split(",")]


def begin(condition: str = "") -> str:
    """Inserts the intent, if the session is open and the condition holds. FOR SHARE: the session
    cannot be closed between the check of its status and the insert."""
    return (
        f"INSERT INTO turns ({rows.INTENT_COLUMNS}, owner) SELECT {INTENT} FROM sessions"
        f" WHERE session_id = $1 AND status = 'open' {condition} FOR SHARE ON CONFLICT DO NOTHING"
    )


BEGIN = begin()
# FOR KEY SHARE, here and below: what others remove meanwhile is waited for, and then not there.
# Else a row could stay of a session that is removed, and be the next one's of the same name.
COMMIT = (
    f"INSERT INTO answers (session_id, idx, {rows.ANSWER_COLUMNS}) SELECT {ANSWER} FROM turns"
    " WHERE session_id = $1 AND idx = $2 FOR KEY SHARE"
    " ON CONFLICT (session_id, idx) DO UPDATE SET "
    + ", ".join(f"{name} = excluded.{name}" for name in ANSWER_NAMES)
    + f" WHERE {rows.MAY_COMMIT}"
)
# Images are added together, and removed alone: neither sees half of what the other does.
ADDING_IMAGES = "SELECT pg_advisory_xact_lock_shared($1)"
REMOVING_IMAGES = "SELECT pg_advisory_xact_lock($1)"
ADD_IMAGE = f"INSERT INTO images ({rows.IMAGE_COLUMNS}) VALUES ($1, $2, $3) ON CONFLICT DO NOTHING"
HAS_IMAGE = (
    "INSERT INTO session_images (session_id, sha256) SELECT session_id, $2::text FROM sessions"
    " WHERE session_id = $1 FOR KEY SHARE"
    " ON CONFLICT (session_id, sha256) DO UPDATE SET sha256 = excluded.sha256"
)
IMAGE = f"SELECT {rows.IMAGE_COLUMNS} FROM images WHERE sha256 = $1"
REMOVE_SESSION_IMAGES = (
    "DELETE FROM session_images WHERE session_id = ANY($1::text[]) RETURNING sha256"
)
REMOVE_UNUSED_IMAGES = (
    "DELETE FROM images WHERE sha256 = ANY($1::text[])"
    " AND NOT EXISTS (SELECT 1 FROM session_images s WHERE s.sha256 = images.sha256)"
)
IS_TURN = "SELECT 1 FROM turns WHERE session_id = $1 AND idx = $2"
SET_STATUS = (
    "INSERT INTO answers (session_id, idx, status, sampled_ids, logprobs, versions, answer_key,"
    " answer) SELECT $1::text, $2::int, $3::text, '', '', '', '', '' FROM turns"
    " WHERE session_id = $1 AND idx = $2 FOR KEY SHARE"
    " ON CONFLICT (session_id, idx) DO UPDATE SET status = excluded.status"
)
TURNS = (
    f"{rows.lineage('$1::text', least='least')} SELECT {rows.TURN_COLUMNS} FROM lineage l"
    f" JOIN turns t ON {rows.IN_LINEAGE}"
    " LEFT JOIN answers a ON a.session_id = t.session_id AND a.idx = t.idx"
    " WHERE t.idx >= $2 AND t.idx < coalesce($3::int, t.idx + 1) ORDER BY t.idx"
)
REPLAYED = (
    "SELECT d.idx FROM deliveries d JOIN sessions s ON s.session_id = d.session_id"
    " WHERE d.session_id = $1 AND d.idx < s.origin_turn AND d.arrived = 1"
)
# A session cannot be removed while it becomes the origin of a branch. What is read in the same
# transaction after the lock includes what others have written before.
LOCKED = "SELECT 1 FROM sessions WHERE session_id = $1 FOR UPDATE"
ORIGIN = (
    "SELECT (SELECT session_id FROM sessions WHERE origin_session = s.session_id"
    " AND origin_salvages = 1) FROM sessions s WHERE session_id = $1"
)
BRANCHES = "SELECT count(*) FROM sessions WHERE origin_session = $1"
HELD_ELSEWHERE = (
    "SELECT o.number, o.address FROM turns t JOIN owners o ON o.number = t.owner"
    " LEFT JOIN answers a ON a.session_id = t.session_id AND a.idx = t.idx"
    " LEFT JOIN deliveries d ON d.session_id = t.session_id AND d.idx = t.idx"
    " WHERE t.session_id = $1 AND t.owner <> $2 AND o.address IS NOT NULL"
    " AND (a.idx IS NULL OR (a.status = 'done' AND d.idx IS NULL))"
)
UNDELIVERED = (
    "SELECT t.idx, t.owner, d.arrived FROM turns t"
    " JOIN answers a ON a.session_id = t.session_id AND a.idx = t.idx"
    " LEFT JOIN deliveries d ON d.session_id = t.session_id AND d.idx = t.idx"
    " WHERE t.session_id = $1 AND a.status = 'done' AND coalesce(d.arrived, 0) = 0"
)
MARK = (
    "INSERT INTO deliveries (session_id, idx, arrived) SELECT $1::text, $2::int, $3::int"
    " FROM sessions WHERE session_id = $1 FOR KEY SHARE"
    " ON CONFLICT (session_id, idx) DO UPDATE SET arrived = excluded.arrived"
)
CUT = (
    "INSERT INTO answers (session_id, idx, status, sampled_ids, logprobs, versions, answer_key,"
    " answer) SELECT $1::text, $2::int, 'cut', '', '', '', '', '' FROM turns"
    " WHERE session_id = $1 AND idx = $2 AND owner = $3 FOR KEY SHARE ON CONFLICT DO NOTHING"
)
_ADD_REWARD = (
    f"INSERT INTO rewards ({rows.REWARD_COLUMNS}, session_id) SELECT $1::text,"
    " $2::double precision, $3::bytea, $4::int, $5::int, session_id"
    " FROM sessions WHERE session_id = $6 FOR KEY SHARE"
)
ADD_REWARD = f"{_ADD_REWARD} ON CONFLICT DO NOTHING RETURNING 1"
SET_REWARD = f"{_ADD_REWARD} {rows.REPLACES_REWARD} RETURNING 1"
ADD_EVENT = (
    "INSERT INTO events (at, kind, data, session_id) SELECT $1::double precision, $2::text,"
    " $3::bytea, session_id FROM sessions WHERE session_id = $4 FOR KEY SHARE RETURNING seq"
)
IS_SESSION = "SELECT 1 FROM sessions WHERE session_id = $1"
MARKS = (
    f"SELECT session_id, {rows.MARK_COLUMNS} FROM marks WHERE session_id = ANY($1::text[])"
    " ORDER BY at"
)
TABLES = ("sessions", "turns", "answers", "deliveries", "rewards", "events", "marks")
UNREFERRED = "NOT EXISTS (SELECT 1 FROM sessions WHERE origin_session = s.session_id)"
# SKIP LOCKED: proxies that remove sessions at the same time remove different ones.
ENDED = (
    "SELECT session_id FROM sessions s WHERE coalesce(completed_at, expires_at) < $1"
    f" AND {UNREFERRED}"
    " ORDER BY coalesce(completed_at, expires_at) LIMIT $2 FOR UPDATE SKIP LOCKED"
)
# Again after the lock, because a branch may have begun between the two.
STILL_UNREFERRED = (
    f"SELECT session_id FROM sessions s WHERE session_id = ANY($1::text[]) AND {UNREFERRED}"
)
HELD = (
    "SELECT objid FROM pg_locks WHERE locktype = 'advisory' AND classid = $1 AND granted"
    " AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
)
