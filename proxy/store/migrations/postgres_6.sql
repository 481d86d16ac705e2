-- What the page in the browser shows: sessions by time, and the forks of each cause.
CREATE INDEX sessions_by_creation ON sessions (created_at, session_id);
CREATE INDEX forks_by_cause ON turns (fork_cause, started_at) WHERE fork_cause IS NOT NULL;

-- The order in which turns begin and end. NULL for turns that earlier programs recorded, so that no
-- table is rewritten.
CREATE SEQUENCE turns_seq;
ALTER TABLE turns ADD COLUMN seq BIGINT;
ALTER TABLE turns ALTER COLUMN seq SET DEFAULT nextval('turns_seq');
CREATE INDEX turns_by_seq ON turns (seq);
CREATE SEQUENCE answers_seq;
ALTER TABLE answers ADD COLUMN seq BIGINT;
ALTER TABLE answers ALTER COLUMN seq SET DEFAULT nextval('answers_seq');
CREATE INDEX answers_by_seq ON answers (seq);

-- Who may read the page: links, cookies and keys, each as the digest of its secret.
CREATE TABLE view_grants (
    digest BYTEA PRIMARY KEY,
    kind TEXT NOT NULL,
    name TEXT NOT NULL,
    created_at DOUBLE PRECISION NOT NULL,
    expires_at DOUBLE PRECISION
);
CREATE INDEX view_grants_by_name ON view_grants (name);
