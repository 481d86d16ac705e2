"""Ids of runs: they cannot be guessed, and are valid file names."""

from __future__ import annotations

import secrets


def new_run_id() -> str:
    return f"run-{secrets.token_hex(8)}"
