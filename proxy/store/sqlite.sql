-- The layout of a store's tables. Change LAYOUT in layout.py with every change of this script.
CREATE TABLE agentic_proxy_schema (
    version INTEGER NOT NULL,
    written_by TEXT NOT NULL  -- the version of agentic-rl
);

-- The processes that opened the store.
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
    metadata BLOB NOT NULL,
    -- Where a branch begins: its turns before origin_turn are those of another session.
    origin_session TEXT,
    origin_turn INTEGER,
    origin_salvages INTEGER NOT NULL DEFAULT 0,
    origin BLOB
) WITHOUT ROWID;
CREATE UNIQUE INDEX sessions_by_key ON sessions (key_hash);
CREATE INDEX sessions_by_origin ON sessions (origin_session) WHERE origin_session IS NOT NULL;
-- For the page: sessions by time.
CREATE INDEX sessions_by_creation ON sessions (created_at, session_id);
-- For the removal of sessions that ended long ago.
CREATE INDEX sessions_by_end ON sessions (coalesce(completed_at, expires_at));

-- What is known before sampling. Never updated: a turn without an answer is open.
CREATE TABLE turns (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,  -- the order in which turns begin; none is used twice
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
    request BLOB NOT NULL,  -- the messages and tools that the request adds
    images BLOB,  -- where images are in prompt_ids, as JSON
    UNIQUE (session_id, idx)
);
CREATE INDEX forks_by_cause ON turns (fork_cause, started_at) WHERE fork_cause IS NOT NULL;

-- What is known after it.
CREATE TABLE answers (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,  -- the order in which turns end
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
    engine TEXT,  -- the engine that sampled the end of the answer
    routed_experts BLOB,  -- the experts that the router of each layer chose, as .npy
    alternatives BLOB,  -- the most probable tokens at each position: proxy/alternatives.py
    UNIQUE (session_id, idx)
);

-- Whether an answer arrived at its agent. A row of its own, because answers are large.
CREATE TABLE deliveries (
    session_id TEXT NOT NULL,
    idx INTEGER NOT NULL,
    arrived INTEGER NOT NULL,
    UNIQUE (session_id, idx)
);

CREATE TABLE rewards (
    seq INTEGER PRIMARY KEY,
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

-- The version of each policy that is sampled from, the engines' name of its adapter, and the run
-- that trains it.
CREATE TABLE policies (
    name TEXT PRIMARY KEY,
    version INTEGER NOT NULL,
    adapter TEXT NOT NULL,
    run TEXT NOT NULL
) WITHOUT ROWID;

-- Quotas that hold for all sessions which name them; a NULL maximum is no limit.
CREATE TABLE quotas (
    name TEXT PRIMARY KEY,
    max_turns INTEGER,
    max_tokens INTEGER,
    turns INTEGER NOT NULL DEFAULT 0,
    tokens INTEGER NOT NULL DEFAULT 0
);

-- Who may read the page: links, cookies and keys, each as the digest of its secret.
CREATE TABLE view_grants (
    digest BLOB PRIMARY KEY,
    kind TEXT NOT NULL,
    name TEXT NOT NULL,
    created_at REAL NOT NULL,
    expires_at REAL
) WITHOUT ROWID;
CREATE INDEX view_grants_by_name ON view_grants (name);

-- The sessions that match search rules, and the rules that were saved from the page.
CREATE TABLE marks (
    session_id TEXT NOT NULL,
    rule TEXT NOT NULL,
    action TEXT NOT NULL,
    turn INTEGER NOT NULL,
    at REAL NOT NULL,
    found TEXT NOT NULL,
    PRIMARY KEY (session_id, rule)
) WITHOUT ROWID;
CREATE TABLE search_rules (
    name TEXT PRIMARY KEY,
    query BLOB NOT NULL,
    created_at REAL NOT NULL
) WITHOUT ROWID;

-- Each image once, whatever sessions and turns have it.
CREATE TABLE images (
    sha256 TEXT PRIMARY KEY,
    media_type TEXT NOT NULL,
    data BLOB NOT NULL
);
CREATE TABLE session_images (
    session_id TEXT NOT NULL,
    sha256 TEXT NOT NULL,
    PRIMARY KEY (session_id, sha256)
) WITHOUT ROWID;
CREATE INDEX sessions_by_image ON session_images (sha256);
