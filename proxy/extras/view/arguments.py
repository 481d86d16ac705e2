"""The arguments of `agentic-proxy view` and `view-key`."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

from proxy.commands.arguments import add_store
from proxy.machine.port import MAX_PORT


def add_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds `view` and `view-key`."""
    _add_view(commands.add_parser("view", help="show a run or a store in the browser"))
    keys = commands.add_parser("view-key", help="who else may read the page in the browser")
    _add_view_key(keys.add_subparsers(required=True, metavar="create|revoke|list"))


def _view(arguments: argparse.Namespace) -> int:
    from proxy.extras.view.command import view

    return asyncio.run(view(arguments))


def _create_key(arguments: argparse.Namespace) -> int:
    from proxy.extras.view.command import create_key

    return asyncio.run(create_key(arguments))


def _revoke_key(arguments: argparse.Namespace) -> int:
    from proxy.extras.view.command import revoke_key

    return asyncio.run(revoke_key(arguments))


def _list_keys(arguments: argparse.Namespace) -> int:
    from proxy.extras.view.command import list_keys

    return asyncio.run(list_keys(arguments))


def _add_view(parser: argparse.ArgumentParser) -> None:
    add_store(parser)
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
    parser.add_argument(
        "--edit", action="store_true", help="the link also rates, tags and deletes sessions"
    )
    parser.add_argument(
        "--with-secrets",
        action="store_true",
        help="show keys, passwords and e-mail addresses (default: masked)",
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
        add_store(parser)
    listed = actions.add_parser("list", help="the names of all keys")
    listed.set_defaults(run=_list_keys)
    add_store(listed)
