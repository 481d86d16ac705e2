"""The trainer's errors: one type per boundary, each naming the value, the bound and what to do.

TrainerError
├── ConfigError      a key, its value, and what to do            exit code 2
├── WeightSyncError  an engine does not serve the trainer's weights
├── CheckpointError  a run cannot be saved or resumed
└── TrainingError    a step cannot be made (no trainable rollouts, tokens lost, NaN)
"""

from __future__ import annotations


class TrainerError(Exception):
    """Its text is one line, shown as it is; the process ends with `exit_code`."""

    exit_code = 1


class ConfigError(TrainerError):
    exit_code = 2


class WeightSyncError(TrainerError):
    pass


class CheckpointError(TrainerError):
    pass


class TrainingError(TrainerError):
    pass
