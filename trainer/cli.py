"""`agentic-train`: a run from a configuration, its continuation, its report.

    agentic-train --config FILE [key=value …]     train
    agentic-train --config FILE --check           print the resolved configuration and end
    agentic-train resume RUN [key=value …]        continue a run that was cut
    agentic-train report RUN                      write RUN/report.html from what is there
    agentic-train --swarm-server HOST:PORT        train what a swarm of clients brings

Invariant: whatever is wrong ends in one line on standard error and an exit code other than 0 (2:
the configuration; 1: the run; 128 + N: signal N), with no process left behind.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from agent_loop.errors import AgentLoopError
from agent_loop.swarm.serve import ServeOptions, serve
from proxy.client import ProxyClientError
from proxy.errors import ConfigurationError, ProxyError
from trainer.errors import ConfigError, TrainerError

EXPECTED = (TrainerError, ProxyError, ProxyClientError, AgentLoopError)
"""Errors whose text is one line for the user; anything else is our bug and shows its traceback."""


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    try:
        if arguments.swarm_server:
            return _serve_swarm(arguments.swarm_server, arguments.state_dir, arguments.config)
        return _run(arguments.words, arguments.config, check=arguments.check)
    except KeyboardInterrupt:  # before the run took over, or after it
        return 128 + signal.SIGINT
    except (*EXPECTED, ExceptionGroup) as error:
        expected = _first_expected(error)
        if expected is None:
            raise
        print(f"agentic-train: {' '.join(str(expected).split())}", file=sys.stderr)
        if isinstance(expected, TrainerError):
            return expected.exit_code
        return 2 if isinstance(expected, ConfigurationError) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="agentic-train",
        description=(__doc__ or "").partition("Invariant")[0],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="YAML; see docs/configuration.md"
    )
    parser.add_argument("--check", action="store_true", help="only check the configuration")
    parser.add_argument(
        "--swarm-server",
        metavar="HOST:PORT",
        help="serve a swarm, which starts the trainer; --config: its YAML to begin with",
    )
    parser.add_argument(
        "--state-dir", type=Path, default=Path("runs/swarm"), help="of the swarm server"
    )
    parser.add_argument("words", nargs="*", metavar="[resume RUN | report RUN] [key=value …]")
    return parser


def _run(words: Sequence[str], config: Path | None, *, check: bool) -> int:
    command, rest = (words[0], words[1:]) if words and "=" not in words[0] else ("train", words)
    if command == "report":
        return _report(rest)
    if command not in ("train", "resume"):
        raise ConfigError(f"{command!r}: expected key=value, resume RUN or report RUN")
    from trainer.run.start import begin, check_only, resume

    if command == "resume":
        if not rest or "=" in rest[0]:
            raise ConfigError("resume: give the run's folder, like runs/quickstart")
        return resume(Path(rest[0]), rest[1:], os.environ)
    if config is None:
        raise ConfigError("--config: missing; give a YAML file, like agentic_trainer.yaml")
    if check:
        print(check_only(config, rest, os.environ), end="")
        return 0
    return begin(config, rest, os.environ)


def _serve_swarm(address: str, state_dir: Path, config: Path | None) -> int:
    """Imports nothing of the trainer: that is a child, started by the swarm's clients."""
    program = [sys.executable, "-m", "trainer.cli"]
    begin, resume = [*program, "--config", "{config}"], [*program, "resume", "{run_dir}"]
    options = ServeOptions(address, state_dir, begin, resume, config=config)
    asyncio.run(serve(options, lambda url: print(f"swarm server on {url}", flush=True)))
    return 0


def _report(words: Sequence[str]) -> int:
    from trainer.report import write_report
    from trainer.run.folder import RunFolder

    if len(words) != 1:
        raise ConfigError("report: give one run's folder, like runs/quickstart")
    print(write_report(RunFolder.open(Path(words[0]))))
    return 0


def _first_expected(error: BaseException) -> BaseException | None:
    """The first expected error in a group of only expected ones."""
    if not isinstance(error, BaseExceptionGroup):
        return error if isinstance(error, EXPECTED) else None
    found = [_first_expected(each) for each in error.exceptions]
    return None if None in found else found[0]


if __name__ == "__main__":
    sys.exit(main())
