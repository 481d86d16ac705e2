"""A rank of the trainer other than 0: builds the models and executes each step that rank 0 sends.

    python -m trainer.cluster.follower SECTIONS SEAT

SECTIONS is a JSON file (or a pipe, `/dev/fd/N`) of a `RanksConfig`, SEAT a `Seat` as JSON.

Invariant: it prints `joining` on standard output once it is ready to join the other ranks.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch

from proxy.machine.secrecy import hide_memory
from trainer.cluster.rank_models import models_of_rank
from trainer.learning.models import follow
from trainer.policy.parallelism import Seat
from trainer.ranks_config import RanksConfig


def main() -> None:
    hide_memory()
    config = RanksConfig.model_validate_json(Path(sys.argv[1]).read_text(encoding="utf-8"))
    seat = Seat(**json.loads(sys.argv[2]))
    torch.set_num_threads(max(1, torch.get_num_threads() // seat.size))
    sys.stdout.write("joining\n")
    sys.stdout.flush()
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    follow_rank_0(config, seat)


def follow_rank_0(config: RanksConfig, seat: Seat) -> None:
    """Trains with rank 0, until it has finished."""
    models = models_of_rank(config, seat)
    follow(models)
    models.policy.ranks.leave()


if __name__ == "__main__":
    main()
