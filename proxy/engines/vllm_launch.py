"""Starts vLLM's API server with an API key that no other process can read.

    python -m proxy.engines.vllm_launch FD ARGUMENTS…

The key is read from the descriptor FD, which is a pipe or a file. vLLM itself accepts a key only as
an argument or from the environment, and every process of the same user can read both.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import sys
from functools import partial
from importlib import import_module
from typing import Any

from proxy.engines.vllm_key import RequireKey
from proxy.imports import importing
from proxy.secrecy import from_pipe

MODULE = "vllm.entrypoints.openai.api_server"
"""The module instead of the `vllm` command, which fails with the CPU distribution."""


def main() -> None:
    RequireKey.key = from_pipe(int(sys.argv[1])).strip()
    del sys.argv[1]
    with importing():
        import_module(MODULE)
    del sys.modules[MODULE]  # it is executed instead
    if _vllm("platforms").current_platform.is_cpu():
        fork_processes()
    runpy.run_module(MODULE, run_name="__main__", alter_sys=True)


def fork_processes() -> None:
    """Makes vLLM fork its other processes. With a CPU it spawns them, whatever its settings say,
    and each then imports again what this process has imported: two fifths of a start."""
    # A signal to a forked process would else also reach the event loop of this one.
    os.register_at_fork(after_in_child=partial(signal.set_wakeup_fd, -1))
    _vllm("utils.system_utils").get_mp_context = lambda: multiprocessing.get_context("fork")


def _vllm(module: str) -> Any:
    return import_module(f"vllm.{module}")


if __name__ == "__main__":
    main()
