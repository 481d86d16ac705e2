"""Trains the quickstart while the infrastructure ends 15 % of the trials.

    python -m benchmarks.false_zeros --seeds 0 1 2 3 4

`sound`: nothing fails. `failed`: such a trial has failed, and is not trained. `zero`: its reward is
0, as in a loop that takes every end for the agent's. An evaluation is 64 trials, none of which is
ended.
"""

from __future__ import annotations

import sys

from benchmarks.arms import Study, main

EVERY = ["eval.every=4", "eval.before=false", "eval.after=true", "trainer.save_every=0"]
ONCE = [*EVERY, "remote_agent.max_retries=0"]
STUDY = Study(
    "false_zeros",
    {
        "sound": EVERY,
        "failed": [*ONCE, "remote_agent.grader.target=benchmarks/lost_trials.py:or_failure"],
        "zero": [*ONCE, "remote_agent.grader.target=benchmarks/lost_trials.py:or_zero"],
    },
    goal=None,
    steps=16,
    quickstart=True,
)


if __name__ == "__main__":
    sys.exit(main(STUDY, __doc__))
