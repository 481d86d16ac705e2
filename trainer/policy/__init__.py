"""Forward, backward, step: in one process or sharded, each shared token computed once."""
