"""`agentic-train collect`: trials with rewards on the training tasks, without training.

The sessions are recorded with the run's sampling parameters, and each has its reward, so that
`agentic-proxy export --store sqlite:///DIR/sessions.db` makes training data of them. The same
command continues where it was interrupted.
"""

from __future__ import annotations

import argparse
import os

from proxy.records import SessionKind
from trainer.commands import reporting
from trainer.config_sources import load
from trainer.eval_command import print_scores
from trainer.sample_trials import TrialRun


def main(arguments: argparse.Namespace) -> int:
    """Runs `agentic-train collect`; returns its exit code."""
    return reporting("agentic-train collect", lambda: _collect(arguments))


def _collect(arguments: argparse.Namespace) -> int:
    config = load(arguments.config, arguments.words, os.environ)
    repeats = arguments.repeats or 1
    trials = TrialRun(
        config, arguments.out, "train", repeats, SessionKind.TRAIN, limit=arguments.limit
    )
    store = f"sqlite:///{arguments.out}/sessions.db"
    return print_scores(
        trials, f"agentic-proxy export --store {store} --format trl --out trials.parquet"
    )
