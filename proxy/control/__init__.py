"""The control plane: sessions, engines, rewards, events, and read access to the record."""
