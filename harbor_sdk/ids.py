"""Names for runs: no one can guess them, and they are sound as file names."""

from __future__ import annotations

import secrets


def new_run_id() -> str:
    return f"run-{secrets.token_hex(8)}"
