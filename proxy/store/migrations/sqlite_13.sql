-- Quotas that hold for all sessions which name them; a NULL maximum is no limit.
CREATE TABLE quotas (
    name TEXT PRIMARY KEY,
    max_turns INTEGER,
    max_tokens INTEGER,
    turns INTEGER NOT NULL DEFAULT 0,
    tokens INTEGER NOT NULL DEFAULT 0
);
