"""Trains the quickstart with top-k and top-p: exactly, and as if they had not been there.

    python -m benchmarks.top_p --seeds 0 1 2 3 4     each of `STUDY`'s arms with five seeds
    python -m benchmarks.top_p ignored --seeds 0     one run

`whole` samples from all tokens; `exact` and `ignored` from the 10 most probable ones, and of those
from the ones that together have 90 %. `ignored` computes probabilities over all tokens, as trainers
do that are not told. An evaluation is 64 trials, whose tokens are sampled from all tokens.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from benchmarks.arms import Study, main

if TYPE_CHECKING:
    from agent_loop.records import Group

LEFT = ["rollout.top_k=10", "rollout.top_p=0.9"]
EVERY = ["eval.every=4", "eval.before=false", "eval.after=true", "trainer.save_every=0"]
STUDY = Study(
    "top_p",
    {
        "whole": EVERY,
        "exact": [*EVERY, *LEFT],
        "ignored": [
            *EVERY,
            *LEFT,
            "rollout.filter.target=benchmarks/top_p.py:forget",
            "engine.verify_tolerance=10",  # or the first step would end the run
        ],
    },
    goal=None,
    steps=16,
    quickstart=True,
)


def forget(group: Group) -> bool:
    """Keeps each group, without what top-k and top-p left."""
    for rollout in group.rollouts:
        for segment in rollout.segments:
            object.__setattr__(segment, "kept", None)
    return True


if __name__ == "__main__":
    sys.exit(main(STUDY, __doc__))
