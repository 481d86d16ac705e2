"""The arguments of `agentic-proxy rewind`."""

from __future__ import annotations

import argparse
from pathlib import Path

from proxy.commands.arguments import add_agent, add_branch


def add_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds `rewind`."""
    _add_rewind(commands.add_parser("rewind", help="run an agent again from a recorded turn"))


def _rewind(arguments: argparse.Namespace) -> int:
    from proxy.extras.rewind.command import rewind

    return rewind(arguments)


def _add_rewind(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s SESSION --turn K [options] -- PROGRAM ARGUMENT …"
    parser.add_argument("origin", metavar="SESSION", help="the recorded session")
    parser.add_argument(
        "--turn",
        type=int,
        required=True,
        metavar="K",
        help="the first K turns are answered from the recording",
    )
    add_branch(parser)
    parser.add_argument("-n", type=int, default=1, metavar="N", help="number of continuations (1)")
    parser.add_argument(
        "--jobs", type=int, default=4, metavar="N", help="continuations that run at once (4)"
    )
    parser.add_argument(
        "--workspace",
        type=Path,
        metavar="FOLDER",
        help="the agent's folder as it was at its start; each continuation gets a copy (default:"
        " an empty folder)",
    )
    parser.add_argument(
        "--check",
        metavar="COMMAND",
        help="a shell command, run in each folder after the agent: the reward is 1 if it succeeds",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("rewind"),
        metavar="FOLDER",
        help="where the continuations' folders and logs are kept (rewind)",
    )
    add_agent(parser)
    parser.add_argument(
        "program", nargs="+", metavar="PROGRAM ARGUMENT", help="the agent's command, after --"
    )
    parser.set_defaults(run=_rewind)
