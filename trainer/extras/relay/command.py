"""`agentic-train relay-worker`: an engine on this machine for a run on another one."""

from __future__ import annotations

import argparse

from trainer.commands.runs import reporting
from trainer.extras.relay.node import serve_from_stdin


def main(_: argparse.Namespace) -> int:
    """Runs `agentic-train relay-worker`; returns its exit code."""
    return reporting("agentic-train relay-worker", serve_from_stdin)
