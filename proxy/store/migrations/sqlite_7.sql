-- The version of each policy that is sampled from, and the engines' name of its adapter.
CREATE TABLE policies (
    name TEXT PRIMARY KEY,
    version INTEGER NOT NULL,
    adapter TEXT NOT NULL
) WITHOUT ROWID;
