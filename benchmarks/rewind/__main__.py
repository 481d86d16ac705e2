"""Trains one task with a sparse reward from prefixes, in trees, and in neither way.

    python -m benchmarks.rewind                     all of `STUDY`'s arms, seeds 0, 1 and 2
    python -m benchmarks.rewind trees --seeds 0     one run
    python -m benchmarks.rewind --table             no run, only the results of those in --out

An evaluation is 32 walks from the start, 4 through each house.
"""

from __future__ import annotations

import sys

from benchmarks.arms import Study, main

STUDY = Study(
    "rewind",
    {
        "neither": [],
        # With the default `low` of 0.1, hardly a group would begin with a prefix after the first
        # steps.
        "prefix": ["rollout.prefix.low=0.4"],
        # A walk of 10 turns, branches of 8, 6, 4 and 2: a group samples 4 * 30 turns, not 8 * 10.
        "trees": [
            "rollout.tree={every: 2, children: 1}",
            "rollout.group_size=4",
            "algorithm.advantage=tree",
        ],
    },
)

if __name__ == "__main__":
    sys.exit(main(STUDY, __doc__))
