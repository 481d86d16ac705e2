"""A program with a low soft limit of open files: SOFT MODULE ARGUMENT…, as `python -m MODULE`."""

from __future__ import annotations

import os
import resource
import sys

if __name__ == "__main__":
    soft, *words = sys.argv[1:]
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (int(soft), hard))
    os.execv(sys.executable, [sys.executable, "-m", *words])
