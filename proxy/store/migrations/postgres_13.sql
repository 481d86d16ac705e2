-- Quotas that hold for all sessions which name them; a NULL maximum is no limit.
CREATE TABLE quotas (
    name TEXT PRIMARY KEY,
    max_turns BIGINT,
    max_tokens BIGINT,
    turns BIGINT NOT NULL DEFAULT 0,
    tokens BIGINT NOT NULL DEFAULT 0
);
