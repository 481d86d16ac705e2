"""The arguments of `agentic-proxy export`."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

from proxy.commands.arguments import add_filters, add_instead, add_store, add_tags
from proxy.extras.export.registry import FORMATS, RECORDS


def add_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds `export`."""
    _add_export(commands.add_parser("export", help="write sessions as training data"))


def _export(arguments: argparse.Namespace) -> int:
    from proxy.extras.export.command import export_sessions

    return asyncio.run(export_sessions(arguments))


def _add_export(parser: argparse.ArgumentParser) -> None:
    add_store(parser)
    add_instead(parser)
    add_filters(parser)
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
    add_tags(parser, "only sessions with this entry in their metadata")
    parser.add_argument(
        "--reward", metavar="KEY", help="the reward to use (default: that of the trial)"
    )
    parser.add_argument("--min-reward", type=float, metavar="X", help="only rewards of at least X")
    parser.add_argument("--max-reward", type=float, metavar="X", help="only rewards of at most X")
    parser.add_argument(
        "--where",
        metavar="MODULE:FUNCTION",
        help="a function of yours that gets the session and its turns, and returns True to export",
    )
    parser.add_argument(
        "--model",
        type=Path,
        metavar="FOLDER",
        help="the checkpoint whose tokenizer shows which token ids spell secrets",
    )
    parser.add_argument(
        "--with-secrets",
        action="store_true",
        help="export keys, passwords and e-mail addresses as recorded (default: masked, untrained)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        metavar="PATH",
        help="FILE.jsonl, FILE.parquet, or a folder for a Hugging Face dataset",
    )
    parser.set_defaults(run=_export)
