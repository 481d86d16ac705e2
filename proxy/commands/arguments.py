"""The arguments of all commands of `agentic-proxy` but `serve`.

Invariant: this module imports nothing that takes long, so that `--help` is fast. A command imports
what it needs when it runs.
"""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path
from typing import Literal, get_args

from proxy.extras.export.registry import FORMATS, RECORDS
from proxy.machine.port import MAX_PORT

Status = Literal["open", "completed", "expired"]
Kind = Literal["train", "eval"]
"""The values of `SessionStatus` and `SessionKind`, repeated here because their module takes too
long to import; a test compares them."""


def add_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds `run`, `rewind`, `sessions`, `export`, `replay`, `view`, `view-key` and `top`."""
    _add_run(commands.add_parser("run", help="run an agent in a recorded session"))
    _add_rewind(commands.add_parser("rewind", help="run an agent again from a recorded turn"))
    sessions = commands.add_parser("sessions", help="read the recorded sessions")
    actions = sessions.add_subparsers(required=True, metavar="list|show")
    _add_list(actions.add_parser("list", help="one line per session"))
    _add_show(actions.add_parser("show", help="a session's conversation, turn by turn"))
    _add_export(commands.add_parser("export", help="write sessions as training data"))
    _add_replay(commands.add_parser("replay", help="score a session again and compare"))
    _add_view(commands.add_parser("view", help="show a run or a store in the browser"))
    keys = commands.add_parser("view-key", help="who else may read the page in the browser")
    _add_view_key(keys.add_subparsers(required=True, metavar="create|revoke|list"))
    _add_top(commands.add_parser("top", help="what a proxy does now: sessions, engines, rates"))


def _list(arguments: argparse.Namespace) -> int:
    from proxy.commands.sessions import list_sessions

    return asyncio.run(list_sessions(arguments))


def _show(arguments: argparse.Namespace) -> int:
    from proxy.commands.sessions import show_session

    return asyncio.run(show_session(arguments))


def _export(arguments: argparse.Namespace) -> int:
    from proxy.extras.export.command import export_sessions

    return asyncio.run(export_sessions(arguments))


def _replay(arguments: argparse.Namespace) -> int:
    from proxy.commands.replay import replay_session

    return asyncio.run(replay_session(arguments))


def _view(arguments: argparse.Namespace) -> int:
    from proxy.commands.view import view

    return asyncio.run(view(arguments))


def _create_key(arguments: argparse.Namespace) -> int:
    from proxy.commands.view import create_key

    return asyncio.run(create_key(arguments))


def _revoke_key(arguments: argparse.Namespace) -> int:
    from proxy.commands.view import revoke_key

    return asyncio.run(revoke_key(arguments))


def _list_keys(arguments: argparse.Namespace) -> int:
    from proxy.commands.view import list_keys

    return asyncio.run(list_keys(arguments))


def _top(arguments: argparse.Namespace) -> int:
    from proxy.commands.top import top

    return top(arguments)


def _run(arguments: argparse.Namespace) -> int:
    from proxy.commands.run import run

    return run(arguments)


def _rewind(arguments: argparse.Namespace) -> int:
    from proxy.extras.rewind.command import rewind

    return rewind(arguments)


def _add_run(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s [options] [-- PROGRAM ARGUMENT …]"
    _add_agent(parser)
    parser.add_argument("--session", metavar="NAME", help="the session's name (default: random)")
    parser.add_argument(
        "--from",
        dest="origin",
        metavar="SESSION",
        help="answer the first calls from this recorded session (see --turn and `rewind`)",
    )
    parser.add_argument("--turn", type=int, metavar="K", help="with --from: the first K turns")
    _add_branch(parser)
    parser.add_argument(
        "--hide",
        action="append",
        default=[],
        metavar="PATH",
        help="with --sandbox light: also hide this file or folder from the agent",
    )
    parser.add_argument(
        "program",
        nargs="*",
        metavar="PROGRAM ARGUMENT",
        help="the agent's command, after --; without it, prints lines to paste into a shell",
    )
    parser.set_defaults(run=_run)


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
    _add_branch(parser)
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
    _add_agent(parser)
    parser.add_argument(
        "program", nargs="+", metavar="PROGRAM ARGUMENT", help="the agent's command, after --"
    )
    parser.set_defaults(run=_rewind)


def _add_branch(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--live",
        action="store_true",
        help="when the agent asks something else than was recorded, go on (default: stop)",
    )
    after = parser.add_mutually_exclusive_group()
    after.add_argument(
        "--edit",
        metavar="TEXT",
        help="another system message for the calls after the recorded ones",
    )
    after.add_argument(
        "--answer",
        type=Path,
        metavar="FILE",
        help="a text that answers the first call after the recorded ones, instead of the model",
    )


def _add_agent(parser: argparse.ArgumentParser) -> None:
    """The proxy that is used, and how the agent runs."""
    _add_store(parser)
    parser.add_argument("--model", type=Path, metavar="FOLDER", help="start a proxy for this model")
    parser.add_argument(
        "--engine", action="append", metavar="URL", help="with --model: a running vLLM"
    )
    _add_url(parser)
    _add_tags(parser, "add this entry to the session's metadata")
    parser.add_argument(
        "--agent", metavar="NAME", help="claude-code, codex, …; default: found by the program"
    )
    parser.add_argument(
        "--sandbox",
        choices=["light", "off"],
        default="light",
        help="light: the proxy's files and other processes are hidden from the agent",
    )


def _add_tags(parser: argparse.ArgumentParser, meaning: str) -> None:
    parser.add_argument(
        "--tag",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help=f"{meaning}; may be given several times",
    )


def _add_list(parser: argparse.ArgumentParser) -> None:
    _add_store(parser)
    _add_filters(parser)
    parser.set_defaults(run=_list)


def _add_show(parser: argparse.ArgumentParser) -> None:
    _add_store(parser)
    parser.add_argument("trial_id", help="the session's id, as `sessions list` prints it")
    parser.add_argument(
        "--model",
        type=Path,
        metavar="FOLDER",
        help="the checkpoint's folder, whose tokenizer turns the recorded prompts into text",
    )
    parser.add_argument(
        "--tokens", action="store_true", help="print each sampled token with its log-probability"
    )
    parser.set_defaults(run=_show)


def _add_export(parser: argparse.ArgumentParser) -> None:
    _add_store(parser)
    _add_filters(parser)
    parser.add_argument(
        "trial_id",
        nargs="*",
        help="export only these sessions (default: all that match the filters)",
    )
    parser.add_argument(
        "--format",
        default="tokens",
        metavar="NAME",
        help=f"{', '.join(FORMATS)}, {RECORDS} (the binary record), or package.module:Class",
    )
    _add_tags(parser, "only sessions with this entry in their metadata")
    parser.add_argument(
        "--reward", metavar="KEY", help="the reward to use (default: the sum of the trial's)"
    )
    parser.add_argument("--min-reward", type=float, metavar="X", help="only rewards of at least X")
    parser.add_argument("--max-reward", type=float, metavar="X", help="only rewards of at most X")
    parser.add_argument(
        "--where",
        metavar="MODULE:FUNCTION",
        help="a function of yours that gets the session and its turns, and returns True to export",
    )
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        metavar="PATH",
        help="FILE.jsonl, FILE.parquet, or a folder for a Hugging Face dataset",
    )
    parser.set_defaults(run=_export)


def _add_replay(parser: argparse.ArgumentParser) -> None:
    _add_store(parser)
    parser.add_argument("trial_id", help="the session's id, as `sessions list` prints it")
    parser.add_argument(
        "--engine",
        required=True,
        metavar="URL",
        help="a vLLM that serves the same weights, http://HOST:PORT or http://:KEY@HOST:PORT. To"
        ' use the one that `serve` started, type "$(cat agentic-proxy-vllm.url)"',
    )
    parser.add_argument(
        "--tolerance",
        type=float,
        metavar="NATS",
        help="exit with code 1 if a log-probability differs by more",
    )
    parser.set_defaults(run=_replay)


def _add_view(parser: argparse.ArgumentParser) -> None:
    _add_store(parser)
    parser.add_argument(
        "shown",
        nargs="*",
        metavar="RUN_OR_STORE",
        help="the folders of training runs, the first of which is shown with its sessions; or the"
        " file or URL of a store",
    )
    parser.add_argument(
        "--model", type=Path, metavar="FOLDER", help="the checkpoint whose tokenizer shows tokens"
    )
    parser.add_argument("--host", default="127.0.0.1", help="the address to listen on (127.0.0.1)")
    parser.add_argument("--port", type=_port, default=0, help="the port (default: any free one)")
    parser.set_defaults(run=_view)


def _port(text: str) -> int:
    port = int(text) if text.isascii() and text.isdigit() else -1
    if not 0 <= port <= MAX_PORT:
        raise argparse.ArgumentTypeError(f"{text!r}: give a port, 1 to {MAX_PORT}, or 0: any free")
    return port


def _add_view_key(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    create = actions.add_parser("create", help="make a key that opens the page until it is revoked")
    revoke = actions.add_parser("revoke", help="end a key, and all browsers that used it")
    for parser, run in ((create, _create_key), (revoke, _revoke_key)):
        parser.add_argument("name", help="whose key it is")
        parser.set_defaults(run=run)
        _add_store(parser)
    listed = actions.add_parser("list", help="the names of all keys")
    listed.set_defaults(run=_list_keys)
    _add_store(listed)


def _add_top(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "The key is the admin key, found as by `run`, or a key of `view-key create`, given as the"
        " variable AGENTIC_PROXY_ADMIN_KEY."
    )
    _add_store(parser)
    _add_url(parser)
    parser.add_argument(
        "--once",
        action="store_true",
        help="print it once; also the case if the output is not a terminal",
    )
    parser.set_defaults(run=_top)


def _add_url(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", help="the running proxy (default: the configured host and port)")


def _add_store(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, help="the proxy's YAML file")
    parser.add_argument("--store", metavar="URL", help="sqlite:///FILE or postgresql://…")


def _add_filters(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--status", choices=get_args(Status), help="only sessions with this status")
    parser.add_argument("--kind", choices=get_args(Kind), help="only sessions of this kind")
    parser.add_argument(
        "--prefix", default="", metavar="TEXT", help="only sessions whose id begins with TEXT"
    )
    parser.add_argument(
        "--marked",
        metavar="RULE",
        help="only sessions that match this search rule; '*': any of them",
    )
