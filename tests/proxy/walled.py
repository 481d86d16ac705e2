"""Runs a shell script behind the wall, in a process of its own that has one thread:

    python -m tests.proxy.walled '{"script": …, "hide": […], "show": […], "keep": …, …}'

A test process has threads, and a fork of it could wait forever for a lock that one of them holds.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any, NoReturn

from proxy import wall
from proxy.machine import landlock, seccomp


def main(job: dict[str, Any]) -> NoReturn:
    def body() -> NoReturn:
        os.dup2(os.open(job["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666), 1)
        os.dup2(1, 2)
        os.chdir(job["keep"])
        os.execvpe("bash", ["bash", "-c", job["script"]], {"PATH": os.environ["PATH"]})

    if user := job["user"]:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
        wall._prctl(wall.PR_SET_DUMPABLE, 1)  # as after an exec
    try:
        if (rules := job["rules_fd"]) >= 0:
            landlock.take_rules(rules)
        files = wall.Files(job["hide"], [(job["keep"], job["keep"])], job["show"])
        wall.enter(files, body, prepare=seccomp.refuse_calls)
    except OSError as error:
        Path(job["output"]).write_text(repr(error))
    os._exit(111)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
