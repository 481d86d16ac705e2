"""`agentic-train`: starts a run from a configuration, continues a run, or writes its report.

    agentic-train init DIR [--agent NAME]         write a project to train (init --help)
    agentic-train --config FILE [key=value …]     train; a later --config overrides an earlier one
    agentic-train --config FILE --check           check and print the resolved configuration;
                                                  --changed: only what is not a default
    agentic-train eval --config FILE --out DIR    evaluate a checkpoint or endpoint (eval --help)
    agentic-train compare DIR DIR …               evaluations with paired differences
    agentic-train collect --config FILE --out DIR trials with rewards, without training
    agentic-train sweep --config FILE --out DIR   several values: seed=0..4 optimizer.lr=1e-4,5e-4
    agentic-train sft --config FILE [key=value …] supervised fine-tuning on recorded sessions
    agentic-train learn --config FILE             learn from daily sessions, beside a recorder
    agentic-train resume RUN [key=value …]        continue a run that was interrupted
    agentic-train status RUN [--json]             how the run is doing, why, and what to do
    agentic-train explain NAME                    what a setting, a metric or a verdict is
    agentic-train report RUN                      write RUN/report.html from the run's folder
    agentic-train audit RUN                       every token was trained or has a reason
    agentic-train replay RUN [--from STEP]        the same weights again, from the record
    agentic-train forget RUN SESSION              the weights without one session
    agentic-train same-prompts RUN RUN            what changes in the prompts of two equal runs
    agentic-train trace RUN [-o FILE]             write what the run did when, for Perfetto
    agentic-train relay-worker                    an engine on another machine, started by a run
    agentic-train --swarm-server HOST:PORT [key=value …]   train on a swarm's episodes

This module imports nothing that takes long, so that `--help` answers at once; the commands are
implemented in `trainer.commands` and in the modules that `trainer.commands.arguments` names.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

from proxy.machine.command_line import escape_unknown_characters, find_own_modules
from proxy.machine.compiled_files import compile_elsewhere
from proxy.machine.direct_hosts import reach_directly
from proxy.machine.open_files import raise_limit
from trainer.commands.arguments import COMMANDS

TRAINER_PACKAGES = frozenset({"peft", "safetensors", "torch", "transformers", "vllm", "xxhash"})
"""Packages that are imported by a training run and installed by the extras `cpu` and `gpu`."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code."""
    escape_unknown_characters()
    reach_directly()
    compile_elsewhere()
    raise_limit()
    words = sys.argv[1:] if argv is None else argv
    find_own_modules()
    line = COMMANDS.get(words[0]) if words else None
    parser = _parser() if line is None else line.parser(words[0])
    arguments = parser.parse_args(words if line is None else words[1:])
    try:
        if line is not None:
            own_main: Callable[[argparse.Namespace], int] = import_module(line.module).main
            return own_main(arguments)
        from trainer.commands.early import early_engines, sources_of

        level = [f"logging.log_level={arguments.log_level}"] if arguments.log_level else []
        sources = sources_of(arguments.config, [*arguments.words, *level], os.environ)
        trains = not arguments.check and arguments.swarm_server is None
        with early_engines(sources) if trains else nullcontext():
            from trainer.commands.runs import Command, run

            command = Command(
                words=arguments.words,
                configs=arguments.config,
                sources=sources,
                check=arguments.check,
                changed=arguments.changed,
                swarm_server=arguments.swarm_server,
                state_dir=arguments.state_dir,
                log_level=arguments.log_level,
            )
            return run(command)
    except ModuleNotFoundError as error:
        if error.name not in TRAINER_PACKAGES:
            raise
        print(
            f"agentic-train: the package {error.name!r} is missing: this installation is for "
            "the proxy alone; install the wheel with its extra `cpu` or `gpu`, as the README "
            "describes",
            file=sys.stderr,
        )
        return 2
    except KeyboardInterrupt:  # only before or after the time in which the run handles signals
        return 128 + signal.SIGINT


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="agentic-train",
        description=(__doc__ or "").partition("This module")[0],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        action="append",
        default=[],
        help="YAML file, see docs/configuration.md; may be given several times",
    )
    release = f"agentic-rl {version('agentic-rl')}"
    parser.add_argument("--version", action="version", version=release)
    parser.add_argument("--check", action="store_true", help="only check the configuration")
    parser.add_argument(
        "--changed", action="store_true", help="with --check: print only what is not a default"
    )
    parser.add_argument(
        "--swarm-server",
        metavar="HOST:PORT",
        help="serve a swarm, whose clients start the trainer with --config or with a YAML of their "
        "own; key=value overrides both",
    )
    parser.add_argument(
        "--state-dir", type=Path, default=Path("runs/swarm"), help="folder of the swarm server"
    )
    parser.add_argument(
        "--log-level",
        choices=["debug", "info", "warning", "error"],
        help="the least important log messages of a run (warning) or of the swarm server (info)",
    )
    parser.add_argument("words", nargs="*", metavar="[COMMAND …] [key=value …]")
    return parser


if __name__ == "__main__":
    sys.exit(main())
