"""A rank of the trainer other than 0: it builds the models and makes each call that rank 0 makes.

    python -m trainer.cluster.follower CONFIG SEAT

Invariant: it says `joining` on standard output when nothing but the others can keep it from it.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch

from trainer.config import TrainerConfig
from trainer.config_sources import load
from trainer.policy.learner import follow
from trainer.policy.parallel import Seat
from trainer.run.assembly import build_models


def main() -> None:
    config = load(Path(sys.argv[1]))
    seat = Seat(**json.loads(sys.argv[2]))
    torch.set_num_threads(max(1, torch.get_num_threads() // seat.size))
    sys.stdout.write("joining\n")
    sys.stdout.flush()
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    follow_rank_0(config, seat)


def follow_rank_0(config: TrainerConfig, seat: Seat) -> None:
    """Until rank 0 says that it is done."""
    learner = build_models(config, seat)
    follow(learner)
    learner.policy.ranks.leave()


if __name__ == "__main__":
    main()
