"""`harbor-server`. Every flag is also a variable HARBOR_SERVER_<FLAG>; the command line wins.

The token comes from HARBOR_SERVER_TOKEN, else from the file `token` in the state folder, which the
server creates at its first start. This module imports the standard library only, so that `--help`
answers at once; `serve.py` has the server.
"""

from __future__ import annotations

import argparse
from importlib import metadata


def main(arguments: list[str] | None = None) -> int:
    given = {k: v for k, v in vars(_parser().parse_args(arguments)).items() if v is not None}
    from harbor_sdk.server.serve import serve

    return serve(given)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="harbor-server", description="Runs Harbor trials for AgentRunClient."
    )
    parser.add_argument("--version", action=_Version)
    parser.add_argument("--host", help="default 127.0.0.1")
    parser.add_argument("--port", type=int, help="default 8090")
    parser.add_argument("--state-dir", help="runs, tasks and trials; default ./harbor-server")
    parser.add_argument("--tasks", action="append", help="folder of tasks; may be repeated")
    parser.add_argument(
        "--environment",
        help="module:Class, or a name of Harbor; default: namespaces of this machine",
    )
    parser.add_argument("--environment-kwargs", help="JSON object: arguments of that environment")
    parser.add_argument("--concurrency", type=int, help="runs at once per environment; default 8")
    parser.add_argument("--environment-concurrency", help='JSON: {"docker": 4}')
    parser.add_argument("--max-queued", type=int, help="default 1000")
    parser.add_argument("--max-archive-mb", type=int, help="default 100")
    parser.add_argument("--max-task-mb", type=int, help="default 1000")
    parser.add_argument("--keep-s", type=float, help="lifetime of finished runs")
    return parser


class _Version(argparse.Action):
    def __init__(self, option_strings: list[str], dest: str) -> None:
        super().__init__(option_strings, dest, nargs=0, help="print the version")

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print(f"harbor-server {metadata.version('agentic-rl')}")
        parser.exit()
