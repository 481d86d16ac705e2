"""The control plane: sessions, engines, rewards, events, and the record as others read it."""
