"""`agentic-train sft`: supervised fine-tuning on recorded sessions.

The run's folder is like that of any run: `agentic-train resume` continues it, `report` shows its
curves, and `checkpoints/step-…/model` is a checkpoint for `model.path` and `eval --model`.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from trainer.commands import reporting


def main(argv: Sequence[str]) -> int:
    """Runs `agentic-train sft`; returns its exit code."""
    parser = argparse.ArgumentParser(
        prog="agentic-train sft",
        description="Trains on recorded sessions: sft.sessions=FOLDER, sft.min_reward=1, …",
    )
    parser.add_argument("--config", type=Path, metavar="FILE", action="append", default=[])
    parser.add_argument("words", nargs="*", metavar="key=value")
    arguments = parser.parse_args(argv)
    return reporting("agentic-train sft", lambda: _train(arguments.config, arguments.words))


def _train(configs: Sequence[Path], words: Sequence[str]) -> int:
    from trainer.start import begin

    return begin(configs, ["sft={}", *words], os.environ)
