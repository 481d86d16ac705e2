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
