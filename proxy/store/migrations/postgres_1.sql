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
    metadata BYTEA NOT NULL
);

-- What is known before sampling. Never updated: a turn without an answer is open.
CREATE TABLE turns (
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
    PRIMARY KEY (session_id, idx)
);

-- What is known after it.
CREATE TABLE answers (
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

CREATE TABLE agentic_proxy_schema (version INTEGER NOT NULL);
