-- The messages and tools that a request adds; empty for turns that earlier programs recorded.
ALTER TABLE turns ADD COLUMN request BYTEA NOT NULL DEFAULT '';
