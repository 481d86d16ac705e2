"""`agentic-train sft`: supervised fine-tuning on recorded sessions.

The run's folder is like that of any run: `agentic-train resume` continues it, `report` shows its
curves, and `checkpoints/step-…/model` is a checkpoint for `model.path` and `eval --model`.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from trainer.commands.runs import reporting
from trainer.settings.values import Sources


def main(arguments: argparse.Namespace) -> int:
    """Runs `agentic-train sft`; returns its exit code."""
    return reporting("agentic-train sft", lambda: _train(arguments.config, arguments.words))


def _train(configs: Sequence[Path], words: Sequence[str]) -> int:
    from trainer.start import begin

    return begin(Sources(configs, ["sft={}", *words], os.environ))
