"""`agentic-train collect`: trials with rewards on the training tasks, without training.

The sessions are recorded with the run's sampling parameters, and each has its reward, so that
`agentic-proxy export --store sqlite:///DIR/sessions.db` makes training data of them, and
`agentic-train sft` trains on them. With `--model URL` they are those of a hosted model, with the
agent's own sampling parameters, and of kind eval. The same command continues where it was
interrupted.
"""

from __future__ import annotations

import argparse

from proxy.records import SessionKind
from trainer.commands.eval import named_model, print_scores
from trainer.commands.runs import reporting
from trainer.commands.sample_trials import TrialRun


def main(arguments: argparse.Namespace) -> int:
    """Runs `agentic-train collect`; returns its exit code."""
    return reporting("agentic-train collect", lambda: _collect(arguments))


def _collect(arguments: argparse.Namespace) -> int:
    config, endpoint = named_model(arguments)
    trials = TrialRun(
        config,
        arguments.out,
        "train",
        arguments.repeats or 1,
        SessionKind.TRAIN if endpoint is None else SessionKind.EVAL,
        endpoint,
        arguments.limit,
        records=True,
    )
    store = f"sqlite:///{arguments.out}/sessions.db"
    if endpoint is not None:
        return print_scores(
            trials, f"agentic-train sft sft.sessions=[{arguments.out}] sft.kind=eval …"
        )
    return print_scores(
        trials, f"agentic-proxy export --store {store} --format trl --out trials.parquet"
    )
