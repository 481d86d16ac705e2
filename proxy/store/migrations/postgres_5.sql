-- Where a branch begins: its turns before origin_turn are those of another session.
ALTER TABLE sessions ADD COLUMN origin_session TEXT COLLATE "C";
ALTER TABLE sessions ADD COLUMN origin_turn INTEGER;
ALTER TABLE sessions ADD COLUMN origin_salvages INTEGER NOT NULL DEFAULT 0;
ALTER TABLE sessions ADD COLUMN origin BYTEA;

CREATE INDEX sessions_by_origin ON sessions (origin_session) WHERE origin_session IS NOT NULL;
