-- Databases of layout 1 that were made by the first programs lack owners.address.
ALTER TABLE owners ADD COLUMN IF NOT EXISTS address TEXT;

-- For the removal of sessions that ended long ago.
CREATE INDEX sessions_by_end ON sessions (coalesce(completed_at, expires_at));
