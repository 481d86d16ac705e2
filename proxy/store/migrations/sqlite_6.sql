-- What the page in the browser shows: sessions by time, and the forks of each cause.
CREATE INDEX sessions_by_creation ON sessions (created_at, session_id);
CREATE INDEX forks_by_cause ON turns (fork_cause, started_at) WHERE fork_cause IS NOT NULL;

-- Who may read the page: links, cookies and keys, each as the digest of its secret.
CREATE TABLE view_grants (
    digest BLOB PRIMARY KEY,
    kind TEXT NOT NULL,
    name TEXT NOT NULL,
    created_at REAL NOT NULL,
    expires_at REAL
) WITHOUT ROWID;
CREATE INDEX view_grants_by_name ON view_grants (name);
