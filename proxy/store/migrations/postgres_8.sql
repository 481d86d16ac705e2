-- The engine that sampled the end of the answer; NULL for turns that earlier programs recorded.
ALTER TABLE answers ADD COLUMN engine TEXT;
