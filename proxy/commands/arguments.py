"""The arguments of all commands of `agentic-proxy` but `serve`.

Invariant: this module imports nothing that takes long, so that `--help` is fast. A command imports
what it needs when it runs.
"""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path
from typing import Literal, get_args

from proxy.extra_registry import COMMANDS
from proxy.settings.plugins import load_plugin

Status = Literal["open", "completed", "expired"]
Kind = Literal["train", "eval"]
"""The values of `SessionStatus` and `SessionKind`, repeated here because their module takes too
long to import; a test compares them."""


def add_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds `run`, `sessions`, `replay`, `top`, `doctor`, and the commands of extras."""
    _add_run(commands.add_parser("run", help="run an agent in a recorded session"))
    sessions = commands.add_parser("sessions", help="read, rate, tag and delete recorded sessions")
    actions = sessions.add_subparsers(required=True, metavar="list|show|rate|tag|delete")
    _add_list(actions.add_parser("list", help="one line per session"))
    _add_show(actions.add_parser("show", help="a session's conversation, turn by turn"))
    _add_rate(actions.add_parser("rate", help="keep what you think of a session"))
    _add_tag(actions.add_parser("tag", help="set entries of a session's metadata"))
    _add_delete(actions.add_parser("delete", help="remove a session and its record"))
    _add_replay(commands.add_parser("replay", help="score a session again and compare"))
    _add_top(commands.add_parser("top", help="what a proxy does now: sessions, engines, rates"))
    _add_doctor(commands.add_parser("doctor", help="what is wrong: key, store, proxy, engines"))
    for path in COMMANDS:
        load_plugin("commands", path, {})(commands)


def _list(arguments: argparse.Namespace) -> int:
    from proxy.commands.sessions import list_sessions

    return asyncio.run(list_sessions(arguments))


def _show(arguments: argparse.Namespace) -> int:
    from proxy.commands.sessions import show_session

    return asyncio.run(show_session(arguments))


def _rate(arguments: argparse.Namespace) -> int:
    from proxy.commands.sessions import rate_session

    return asyncio.run(rate_session(arguments))


def _tag(arguments: argparse.Namespace) -> int:
    from proxy.commands.sessions import tag_session

    return asyncio.run(tag_session(arguments))


def _delete(arguments: argparse.Namespace) -> int:
    from proxy.commands.sessions import delete_session

    return asyncio.run(delete_session(arguments))


def _replay(arguments: argparse.Namespace) -> int:
    from proxy.commands.replay import replay_session

    return asyncio.run(replay_session(arguments))


def _top(arguments: argparse.Namespace) -> int:
    from proxy.commands.top import top

    return top(arguments)


def _doctor(arguments: argparse.Namespace) -> int:
    from proxy.commands.doctor import doctor

    return doctor(arguments)


def _run(arguments: argparse.Namespace) -> int:
    from proxy.commands.run import run

    return run(arguments)


def _add_run(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s [options] [-- PROGRAM ARGUMENT …]"
    add_agent(parser)
    parser.add_argument("--session", metavar="NAME", help="the session's name (default: random)")
    parser.add_argument(
        "--from",
        dest="origin",
        metavar="SESSION",
        help="answer the first calls from this recorded session (see --turn and `rewind`)",
    )
    parser.add_argument("--turn", type=int, metavar="K", help="with --from: the first K turns")
    add_branch(parser)
    parser.add_argument(
        "--hide",
        action="append",
        default=[],
        metavar="PATH",
        help="with --sandbox light: also hide this file or folder from the agent",
    )
    parser.add_argument(
        "--isolated",
        action="store_true",
        help="an agent that would run in your own home, with your settings, memory and MCP servers,"
        " gets an empty home",
    )
    parser.add_argument(
        "program",
        nargs="*",
        metavar="PROGRAM ARGUMENT",
        help="the agent's command, after --; without it, prints lines to paste into a shell",
    )
    parser.set_defaults(run=_run)


def add_branch(parser: argparse.ArgumentParser) -> None:
    """What a branch does after the recorded turns."""
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


def add_agent(parser: argparse.ArgumentParser) -> None:
    """The proxy that is used, and how the agent runs."""
    add_store(parser)
    parser.add_argument("--model", type=Path, metavar="FOLDER", help="start a proxy for this model")
    parser.add_argument(
        "--engine", action="append", metavar="URL", help="with --model: a running vLLM"
    )
    add_url(parser)
    add_tags(parser, "add this entry to the session's metadata")
    parser.add_argument(
        "--agent", metavar="NAME", help="claude-code, codex, …; default: found by the program"
    )
    parser.add_argument(
        "--sandbox",
        choices=["light", "off"],
        default="light",
        help="light: the proxy's files and other processes are hidden from the agent",
    )


def add_tags(parser: argparse.ArgumentParser, meaning: str) -> None:
    """Entries of sessions\' metadata; `meaning` begins the help."""
    parser.add_argument(
        "--tag",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help=f"{meaning}; may be given several times",
    )


def _add_list(parser: argparse.ArgumentParser) -> None:
    add_store(parser)
    add_instead(parser)
    add_filters(parser)
    parser.add_argument(
        "--last",
        type=int,
        metavar="N",
        help="only the N newest sessions (default: 50 on a terminal, else all)",
    )
    parser.add_argument(
        "--search",
        metavar="WORDS",
        help="only sessions in which somebody wrote this, and where: as the page's search for text",
    )
    parser.set_defaults(run=_list)


def _add_show(parser: argparse.ArgumentParser) -> None:
    add_store(parser)
    add_instead(parser)
    _add_trial_id(parser)
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


def _add_rate(parser: argparse.ArgumentParser) -> None:
    add_store(parser)
    add_instead(parser)
    _add_trial_id(parser, or_this=True)
    parser.add_argument("value", help="up, down, or a number: the session's reward `rating`")
    parser.add_argument("--comment", metavar="TEXT", help="why; `sessions show` prints it")
    parser.set_defaults(run=_rate)


def _add_tag(parser: argparse.ArgumentParser) -> None:
    add_store(parser)
    add_instead(parser)
    _add_trial_id(parser, or_this=True)
    parser.add_argument(
        "tags", nargs="+", metavar="NAME=VALUE", help="what to set; `NAME=` removes the entry"
    )
    parser.set_defaults(run=_tag)


def _add_delete(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "A session that is open is ended by its proxy, which is asked with the admin key."
    )
    add_store(parser)
    _add_trial_id(parser)
    add_instead(parser)
    parser.set_defaults(run=_delete)


def _add_trial_id(parser: argparse.ArgumentParser, *, or_this: bool = False) -> None:
    meaning = "the session's id, as `sessions list` prints it"
    if or_this:
        meaning += "; `this`: that of the agent in which the command runs"
    parser.add_argument("trial_id", help=meaning)


def _add_replay(parser: argparse.ArgumentParser) -> None:
    add_store(parser)
    add_instead(parser)
    _add_trial_id(parser)
    parser.add_argument(
        "--engine",
        required=True,
        metavar="URL",
        help="a vLLM that serves the same weights, http://HOST:PORT or http://:KEY@HOST:PORT. To"
        ' use the one that `serve` started, type "$(cat ~/.local/state/agentic-proxy/vllm.url)"',
    )
    parser.add_argument(
        "--tolerance",
        type=float,
        metavar="NATS",
        help="exit with code 1 if a log-probability differs by more",
    )
    parser.set_defaults(run=_replay)


def _add_top(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "The key is the admin key, found as by `run`, or a key of `view-key create`, given as the"
        " variable AGENTIC_PROXY_ADMIN_KEY."
    )
    add_store(parser)
    add_url(parser)
    parser.add_argument(
        "--once",
        action="store_true",
        help="print it once; also the case if the output is not a terminal",
    )
    parser.set_defaults(run=_top)


def _add_doctor(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "It changes nothing. The exit code is 1 if something is wrong."
    add_store(parser)
    add_url(parser)
    parser.add_argument("--model", type=Path, metavar="FOLDER", help="also check this checkpoint")
    parser.add_argument(
        "--engine", action="append", metavar="URL", help="also ask this engine; several times"
    )
    parser.set_defaults(run=_doctor)


def add_instead(parser: argparse.ArgumentParser) -> None:
    """A running proxy in place of the store."""
    parser.add_argument(
        "--url",
        help="ask this running proxy in place of the store, with the admin key or a person's, as"
        " AGENTIC_PROXY_ADMIN_KEY or in the file AGENTIC_PROXY_ADMIN_KEY_FILE",
    )


def add_url(parser: argparse.ArgumentParser) -> None:
    """The running proxy."""
    parser.add_argument("--url", help="the running proxy (default: the configured host and port)")


def add_store(parser: argparse.ArgumentParser) -> None:
    """Where the record is."""
    parser.add_argument("--config", type=Path, help="the proxy's YAML file")
    parser.add_argument(
        "--store", metavar="URL", help="sqlite:///FILE, a run's folder, or postgresql://…"
    )


def add_filters(parser: argparse.ArgumentParser) -> None:
    """Which sessions."""
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
