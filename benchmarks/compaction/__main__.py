"""Trains an agent that summarises its history: with its summaries, without them, without a limit.

    python -m benchmarks.compaction                 all of `STUDY`'s arms, seeds 0, 1 and 2
    python -m benchmarks.compaction masked --seeds 0one run
    python -m benchmarks.compaction --table         no run, only the results of those in --out

An evaluation is 32 trials, each at a vault that was not trained at.
"""

from __future__ import annotations

import sys

from benchmarks.arms import Study, main

STUDY = Study(
    "compaction",
    {
        "masked": ["remote_agent.credit.function=benchmarks/compaction/masked.py:masked"],
        "trained": [],
        "no_limit": ["remote_agent.python.target=benchmarks/compaction/agent.py:run_without_limit"],
    },
    goal=None,
    steps=12,
)

if __name__ == "__main__":
    sys.exit(main(STUDY, __doc__))
