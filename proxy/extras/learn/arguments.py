"""The arguments of `agentic-proxy policy`."""

from __future__ import annotations

import argparse
from pathlib import Path

ORDERS = ("promote", "rollback", "freeze", "thaw")


def add_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds `policy`."""
    parser = commands.add_parser(
        "policy", help="the adapters that a learner has made: show, promote, roll back, freeze"
    )
    parser.add_argument("action", choices=("show", *ORDERS))
    parser.add_argument("name", nargs="?", default="work", help="the policy (work)")
    parser.add_argument("--url", metavar="URL", help="the recorder (default: the configured one)")
    parser.add_argument("--config", type=Path, help="the recorder's YAML file")
    parser.set_defaults(run=_policy)


def _policy(arguments: argparse.Namespace) -> int:
    from proxy.extras.learn.command import policy

    return policy(arguments)
