"""The arguments of the commands of `agentic-train` that have arguments of their own.

This module imports the standard library only, so that `agentic-train COMMAND --help` answers at
once; a command's module is imported when the command runs.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

KEY_VARIABLES = ("OPENAI_API_KEY", "ANTHROPIC_API_KEY")


@dataclass(frozen=True, slots=True)
class CommandLine:
    """Example: CommandLine("Compares evaluations.", _compare, "trainer.commands.compare")"""

    description: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    module: str
    """The module whose function `main` runs the command with its parsed arguments, and returns the
    exit code."""

    def parser(self, name: str) -> argparse.ArgumentParser:
        """The parser of the command with that name."""
        parser = argparse.ArgumentParser(prog=f"agentic-train {name}", description=self.description)
        self.add_arguments(parser)
        return parser


def _count(text: str) -> int:
    try:
        count = int(text)
    except ValueError:
        count = 0
    if count < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: give a whole number of at least 1")
    return count


def _init(parser: argparse.ArgumentParser) -> None:
    from trainer.commands.init_project import kinds

    parser.add_argument("folder", type=Path, metavar="DIR", help="a new or empty folder")
    parser.add_argument(
        "--agent", default="openai", help=f"one of {', '.join(kinds())} (default: openai)"
    )
    parser.add_argument(
        "--model",
        type=Path,
        metavar="FOLDER",
        help="the checkpoint to train; openai, command and mini-swe-agent bring a small one",
    )


def _configured(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        action="append",
        default=[],
        help="YAML file of a run, see docs/configuration.md; may be given several times",
    )
    parser.add_argument("words", nargs="*", metavar="key=value", help="override keys of the files")


def _trials(parser: argparse.ArgumentParser, endpoint: str) -> None:
    """`endpoint` says what a URL as the model means."""
    _configured(parser)
    parser.add_argument(
        "--out", type=Path, metavar="DIR", required=True, help="new, or of an interrupted command"
    )
    parser.add_argument("--repeats", type=_count, metavar="K", help="trials per task")
    parser.add_argument("--limit", type=_count, metavar="N", help="only the first N tasks")
    parser.add_argument(
        "--model",
        metavar="FOLDER|URL",
        help=f"a checkpoint, which our vLLM serves, or {endpoint} (default: model.path)",
    )
    parser.add_argument("--model-name", metavar="NAME", help="with a URL: the endpoint's model")
    parser.add_argument(
        "--api-key-env",
        metavar="VARIABLE",
        help=f"with a URL: where its key is (default: {' or '.join(KEY_VARIABLES)})",
    )


def _eval(parser: argparse.ArgumentParser) -> None:
    _trials(parser, "an OpenAI-compatible or Anthropic endpoint, which agents call themselves")


def _collect(parser: argparse.ArgumentParser) -> None:
    _trials(
        parser,
        "an OpenAI-compatible endpoint (also Anthropic's), whose answers our proxy records in "
        "sessions of kind eval",
    )


def _compare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folders", nargs="+", type=Path, metavar="DIR", help="--out of an eval, or a run"
    )


def _sweep(parser: argparse.ArgumentParser) -> None:
    _configured(parser)
    parser.add_argument(
        "--out", type=Path, metavar="DIR", required=True, help="new, or of an interrupted command"
    )
    parser.add_argument(
        "--ray",
        metavar="ADDRESS",
        help="run them with Ray Tune: auto, HOST:PORT, or local for a cluster of this machine",
    )
    parser.add_argument("--cpus", type=float, default=1.0, help="of a run on Ray (default: 1)")
    parser.add_argument("--gpus", type=float, default=0.0, help="of a run on Ray (default: 0)")
    parser.add_argument(
        "--scheduler",
        choices=("fifo", "asha", "median_stopping_rule"),
        default="fifo",
        help="Ray Tune's: which runs it ends early, by the reward of their steps (default: none)",
    )
    parser.add_argument(
        "--grace", type=int, metavar="STEPS", default=10, help="no run ends before (default: 10)"
    )


def _status(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN", help="a run's folder")
    parser.add_argument("--json", action="store_true", help="print it as JSON")


def _explain(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "names", nargs="+", metavar="NAME", help="a setting, a metric or a verdict, or its end"
    )


def _trace(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN", help="a run's folder")
    parser.add_argument(
        "-o", "--out", type=Path, metavar="FILE", help="(default: trace.json in the run's folder)"
    )


def _replay(parser: argparse.ArgumentParser) -> None:
    _recorded(parser)
    parser.add_argument(
        "--from",
        dest="start",
        type=int,
        default=0,
        metavar="STEP",
        help="begin with the checkpoint of this step (default: with the model of the run)",
    )
    parser.add_argument("--to", dest="last", type=_count, metavar="STEP", help="the last step")
    parser.add_argument(
        "--engines",
        action="store_true",
        help="sample the recorded turns again, from the weights of each step, and compare them",
    )
    parser.add_argument("words", nargs="*", metavar="key=value", help="keys with other values")


def _forget(parser: argparse.ArgumentParser) -> None:
    _recorded(parser)
    parser.add_argument("session", metavar="SESSION", help="the trial whose tokens are left out")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="a new folder (default: RUN-without-SESSION)"
    )


def _learn(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        required=True,
        help="see docs/learn.md",
    )
    parser.add_argument("--once", action="store_true", help="do what is due now, and end")
    parser.add_argument(
        "--prove", action="store_true", help="compute the stable adapter again, and compare"
    )
    parser.add_argument(
        "--forget",
        nargs="+",
        default=[],
        metavar="SESSION",
        help="delete these sessions, and rebuild what has learned from them",
    )
    parser.add_argument("--day", metavar="YYYY-MM-DD", help="forget the sessions of this day")
    parser.add_argument(
        "--repository", type=Path, metavar="FOLDER", help="forget the sessions in this folder"
    )


def _recorded(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run", type=Path, metavar="RUN", help="the folder of a run with trainer.deterministic"
    )


def _prompts(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs=2, type=Path, metavar="RUN", help="folders of two equal runs")


COMMANDS = {
    "init": CommandLine(
        "Writes a project to train: configuration, tasks, agent and scorer.",
        _init,
        "trainer.commands.init_project",
    ),
    "eval": CommandLine("Evaluates a model on data.val_files.", _eval, "trainer.commands.eval"),
    "collect": CommandLine(
        "Runs trials on data.train_files with rewards, without training.",
        _collect,
        "trainer.commands.collect",
    ),
    "compare": CommandLine(
        "Compares evaluations, or runs by their last ones; differences are paired by task.",
        _compare,
        "trainer.commands.compare",
    ),
    "sweep": CommandLine(
        "Runs a configuration with several values of some keys (seed=0..4, "
        "optimizer.lr=1e-4,5e-4), one run after another or with Ray Tune, and compares them.",
        _sweep,
        "trainer.commands.sweep",
    ),
    "status": CommandLine(
        "Says how a run is doing, why, and what to do next, from its folder.",
        _status,
        "trainer.commands.status",
    ),
    "explain": CommandLine(
        "Says what a setting, a metric or a verdict is.",
        _explain,
        "trainer.commands.explain",
    ),
    "trace": CommandLine(
        "Writes what a run did when as a file that https://ui.perfetto.dev opens.",
        _trace,
        "trainer.extras.trace",
    ),
    "relay-worker": CommandLine(
        "Serves an engine on this machine to a run on another one, which starts this command "
        "(relay.workers) and tells it by standard input what to serve.",
        lambda _: None,
        "trainer.extras.relay.command",
    ),
    "replay": CommandLine(
        "Computes the steps of a run again from its record, and compares their gradients and "
        "weights with its ledger.",
        _replay,
        "trainer.extras.ledger.replay",
    ),
    "audit": CommandLine(
        "Compares a run's ledger with its recorded sessions: every delivered token was trained, or "
        "has a reason.",
        _recorded,
        "trainer.extras.ledger.audit",
    ),
    "forget": CommandLine(
        "Computes the weights that the record of a run gives without one session.",
        _forget,
        "trainer.extras.ledger.forget",
    ),
    "same-prompts": CommandLine(
        "Compares the prompts of two equal runs, and names what in them changes: times, random "
        "ids, folder names.",
        _prompts,
        "trainer.extras.ledger.prompts",
    ),
    "learn": CommandLine(
        "Learns from the sessions that a recorder records, beside it.",
        _learn,
        "trainer.extras.learn.command",
    ),
    "sft": CommandLine(
        "Trains on recorded sessions: sft.sessions=FOLDER, sft.min_reward=1, …",
        _configured,
        "trainer.extras.sft.command",
    ),
}
"""The commands with arguments of their own, by name."""
