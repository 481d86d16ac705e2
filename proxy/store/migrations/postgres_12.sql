-- The most probable tokens at each sampled position (proxy/alternatives.py); NULL: not recorded.
ALTER TABLE answers ADD COLUMN alternatives BYTEA;
