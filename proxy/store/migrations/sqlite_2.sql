-- Databases of layout 1 that were made by the first programs lack owners.address.
ALTER TABLE owners RENAME TO owners_1;
CREATE TABLE owners (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    pid INTEGER,
    started_at REAL,
    address TEXT
);
INSERT INTO owners (number, pid, started_at) SELECT number, pid, started_at FROM owners_1;
DROP TABLE owners_1;

-- For the removal of sessions that ended long ago.
CREATE INDEX sessions_by_end ON sessions (coalesce(completed_at, expires_at));
