"""The trainer's errors: one type per boundary. Messages name the value, the bound and what to do.

TrainerError
├── ConfigError      keys, their values, and what to do          exit code 2
├── WeightSyncError  an engine does not serve the trainer's weights
├── CheckpointError  a run cannot be saved or resumed
└── TrainingError    a step cannot be made (no trainable rollouts, tokens lost, NaN)
"""

from __future__ import annotations


class TrainerError(Exception):
    """An error whose message is one line for the user; the process ends with `exit_code`."""

    exit_code = 1


class ConfigError(TrainerError):
    """A configuration has one problem, or several that are reported together."""

    exit_code = 2

    def __init__(self, *problems: str) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


class WeightSyncError(TrainerError):
    """An engine does not serve the trainer's weights."""


class CheckpointError(TrainerError):
    """A run cannot be saved or resumed."""


class TrainingError(TrainerError):
    """A training step cannot be made."""
