-- The layout of a store's tables. Change LAYOUT in layout.py with every change of this script.
CREATE TABLE agentic_proxy_schema (
    version INTEGER NOT NULL,
    written_by TEXT NOT NULL  -- the version of agentic-rl
);

-- The processes that opened the store.
CREATE TABLE owners (
    number SERIAL PRIMARY KEY,
    started_at TIMESTAMPTZ NOT NULL DEFAULT now(),
    address TEXT
);

CREATE TABLE sessions (
    session_id TEXT COLLATE "C" PRIMARY KEY,
    key_hash BYTEA NOT NULL UNIQUE,
    kind TEXT NOT NULL,
    status TEXT NOT NULL,
    created_at DOUBLE PRECISION NOT NULL,
    expires_at DOUBLE PRECISION NOT NULL,
    completed_at DOUBLE PRECISION,
    sampling BYTEA NOT NULL,
    profile TEXT NOT NULL,
    limits BYTEA NOT NULL,
    metadata BYTEA NOT NULL,
    -- Where a branch begins: its turns before origin_turn are those of another session.
    origin_session TEXT COLLATE "C",
    origin_turn INTEGER,
    origin_salvages INTEGER NOT NULL DEFAULT 0,
    origin BYTEA
);
CREATE INDEX sessions_by_origin ON sessions (origin_session) WHERE origin_session IS NOT NULL;
-- For the page: sessions by time.
CREATE INDEX sessions_by_creation ON sessions (created_at, session_id);
-- For the removal of sessions that ended long ago.
CREATE INDEX sessions_by_end ON sessions (coalesce(completed_at, expires_at));

-- What is known before sampling. Never updated: a turn without an answer is open.
CREATE TABLE turns (
    seq BIGSERIAL,  -- the order in which turns begin
    session_id TEXT COLLATE "C" NOT NULL,
    idx INTEGER NOT NULL,
    owner INTEGER NOT NULL,
    parent INTEGER,
    shared_tokens INTEGER NOT NULL,
    fork_cause TEXT,
    request_key BYTEA NOT NULL,
    sampling BYTEA NOT NULL,
    dialect TEXT NOT NULL,
    agent_id TEXT,
    started_at DOUBLE PRECISION NOT NULL,
    prompt_ids BYTEA NOT NULL,
    request BYTEA NOT NULL,  -- the messages and tools that the request adds
    images BYTEA,  -- where images are in prompt_ids, as JSON
    PRIMARY KEY (session_id, idx)
);
CREATE INDEX forks_by_cause ON turns (fork_cause, started_at) WHERE fork_cause IS NOT NULL;
CREATE INDEX turns_by_seq ON turns (seq);

-- What is known after it.
CREATE TABLE answers (
    seq BIGSERIAL,  -- the order in which turns end
    session_id TEXT COLLATE "C" NOT NULL,
    idx INTEGER NOT NULL,
    status TEXT NOT NULL,
    versions BYTEA NOT NULL,
    finish_reason TEXT,
    answer_key BYTEA NOT NULL,
    first_token_s DOUBLE PRECISION,
    duration_s DOUBLE PRECISION,
    sampled_ids BYTEA NOT NULL,
    logprobs BYTEA NOT NULL,
    answer BYTEA NOT NULL,
    engine TEXT,  -- the engine that sampled the end of the answer
    routed_experts BYTEA,  -- the experts that the router of each layer chose, as .npy
    alternatives BYTEA,  -- the most probable tokens at each position: proxy/alternatives.py
    PRIMARY KEY (session_id, idx)
);
CREATE INDEX answers_by_seq ON answers (seq);

-- Whether an answer arrived at its agent. A row of its own, because answers are large.
CREATE TABLE deliveries (
    session_id TEXT COLLATE "C" NOT NULL,
    idx INTEGER NOT NULL,
    arrived INTEGER NOT NULL,
    PRIMARY KEY (session_id, idx)
);

CREATE TABLE rewards (
    seq BIGSERIAL,
    session_id TEXT COLLATE "C" NOT NULL,
    reward_key TEXT NOT NULL,
    value DOUBLE PRECISION NOT NULL,
    parts BYTEA NOT NULL,
    turn INTEGER,
    branch INTEGER NOT NULL,
    PRIMARY KEY (session_id, reward_key)
);

CREATE TABLE events (
    seq BIGSERIAL PRIMARY KEY,
    session_id TEXT COLLATE "C" NOT NULL,
    at DOUBLE PRECISION NOT NULL,
    kind TEXT NOT NULL,
    data BYTEA NOT NULL
);
CREATE INDEX events_by_session ON events (session_id, seq);

-- The version of each policy that is sampled from, the engines' name of its adapter, and the run
-- that trains it.
CREATE TABLE policies (
    name TEXT PRIMARY KEY,
    version BIGINT NOT NULL,
    adapter TEXT NOT NULL,
    run TEXT NOT NULL
);

-- Quotas that hold for all sessions which name them; a NULL maximum is no limit.
CREATE TABLE quotas (
    name TEXT PRIMARY KEY,
    max_turns BIGINT,
    max_tokens BIGINT,
    turns BIGINT NOT NULL DEFAULT 0,
    tokens BIGINT NOT NULL DEFAULT 0
);

-- Who may read the page: links, cookies and keys, each as the digest of its secret.
CREATE TABLE view_grants (
    digest BYTEA PRIMARY KEY,
    kind TEXT NOT NULL,
    name TEXT NOT NULL,
    created_at DOUBLE PRECISION NOT NULL,
    expires_at DOUBLE PRECISION
);
CREATE INDEX view_grants_by_name ON view_grants (name);

-- The sessions that match search rules, and the rules that were saved from the page.
CREATE TABLE marks (
    session_id TEXT NOT NULL,
    rule TEXT NOT NULL,
    action TEXT NOT NULL,
    turn INTEGER NOT NULL,
    at DOUBLE PRECISION NOT NULL,
    found TEXT NOT NULL,
    PRIMARY KEY (session_id, rule)
);
CREATE TABLE search_rules (
    name TEXT PRIMARY KEY,
    query BYTEA NOT NULL,
    created_at DOUBLE PRECISION NOT NULL
);

-- Each image once, whatever sessions and turns have it.
CREATE TABLE images (
    sha256 TEXT PRIMARY KEY,
    media_type TEXT NOT NULL,
    data BYTEA NOT NULL
);
CREATE TABLE session_images (
    session_id TEXT COLLATE "C" NOT NULL,
    sha256 TEXT NOT NULL,
    PRIMARY KEY (session_id, sha256)
);
CREATE INDEX sessions_by_image ON session_images (sha256);
