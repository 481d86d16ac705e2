CREATE TABLE owners (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    pid INTEGER,
    started_at REAL,
    address TEXT
);

CREATE TABLE sessions (
    session_id TEXT PRIMARY KEY,
    key_hash BLOB NOT NULL,
    kind TEXT NOT NULL,
    status TEXT NOT NULL,
    created_at REAL NOT NULL,
    expires_at REAL NOT NULL,
    completed_at REAL,
    sampling BLOB NOT NULL,
    profile TEXT NOT NULL,
    limits BLOB NOT NULL,
    metadata BLOB NOT NULL
) WITHOUT ROWID;
CREATE UNIQUE INDEX sessions_by_key ON sessions (key_hash);

-- What is known before sampling. Never updated: a turn without an answer is open.
CREATE TABLE turns (
    session_id TEXT NOT NULL,
    idx INTEGER NOT NULL,
    owner INTEGER NOT NULL,
    parent INTEGER,
    shared_tokens INTEGER NOT NULL,
    fork_cause TEXT,
    request_key BLOB NOT NULL,
    sampling BLOB NOT NULL,
    dialect TEXT NOT NULL,
    agent_id TEXT,
    started_at REAL NOT NULL,
    prompt_ids BLOB NOT NULL,
    UNIQUE (session_id, idx)
);

-- What is known after it.
CREATE TABLE answers (
    session_id TEXT NOT NULL,
    idx INTEGER NOT NULL,
    status TEXT NOT NULL,
    versions BLOB NOT NULL,
    finish_reason TEXT,
    answer_key BLOB NOT NULL,
    first_token_s REAL,
    duration_s REAL,
    sampled_ids BLOB NOT NULL,
    logprobs BLOB NOT NULL,
    answer BLOB NOT NULL,
    UNIQUE (session_id, idx)
);

CREATE TABLE rewards (
    session_id TEXT NOT NULL,
    reward_key TEXT NOT NULL,
    value REAL NOT NULL,
    parts BLOB NOT NULL,
    turn INTEGER,
    branch INTEGER NOT NULL,
    UNIQUE (session_id, reward_key)
);

CREATE TABLE events (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    session_id TEXT NOT NULL,
    at REAL NOT NULL,
    kind TEXT NOT NULL,
    data BLOB NOT NULL
);
CREATE INDEX events_by_session ON events (session_id, seq);
