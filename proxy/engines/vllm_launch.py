"""Starts vLLM's API server with an API key that no other process can read.

    python -m proxy.engines.vllm_launch FD ARGUMENTS…
    python -m proxy.engines.vllm_launch FD

The key is read from the descriptor FD, which is a pipe or a file. vLLM itself accepts a key only as
an argument or from the environment, and every process of the same user can read both. Without
ARGUMENTS, FD gives them, too (`EarlyOrders` as JSON), after vLLM has been imported.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import runpy
import signal
import sys
import tempfile
from functools import partial
from importlib import import_module
from typing import Any, TypedDict

from proxy.engines import vllm_platform
from proxy.engines.vllm_key import RequireKey
from proxy.engines.vllm_nodes import HEADLESS
from proxy.machine.command_line import importing
from proxy.machine.secrecy import from_pipe

MODULE = "vllm.entrypoints.openai.api_server"
"""The module instead of the `vllm` command, which fails with the CPU distribution."""


class EarlyOrders(TypedDict):
    """What a server is told that started before it was known what it serves."""

    key: str
    arguments: list[str]
    environment: dict[str, str]
    """Only the variables that differ from those with which it started: setproctitle, which vLLM
    uses, finds the command line before the first of them in memory."""
    log: str
    """The file to which its output is appended, with what it has written until then."""


def main() -> None:
    fd = int(sys.argv.pop(1))
    try:
        with importing():
            import_module(MODULE)
    finally:  # what an import prints or raises belongs into the log that the orders name
        RequireKey.key = from_pipe(fd).strip() if len(sys.argv) > 1 else _follow_orders(fd)
    found = _vllm("platforms").current_platform
    if vllm_platform.require(os.environ.get(vllm_platform.DEVICE_VARIABLE), found).forks:
        fork_processes()
    if HEADLESS in sys.argv:
        return _run_workers()
    del sys.modules[MODULE]  # it is executed instead
    runpy.run_module(MODULE, run_name="__main__", alter_sys=True)


def _run_workers() -> None:
    """Runs a part of a server that has only workers, for which MODULE would start a server."""
    _vllm("entrypoints.serve.utils.api_utils").cli_env_setup()
    parser = _vllm("utils.argparse_utils").FlexibleArgumentParser()
    arguments = _vllm("entrypoints.launchers.cli_args").make_arg_parser(parser).parse_args()
    arguments.api_server_count = 0
    _vllm("entrypoints.cli.serve").run_headless(arguments)


def _follow_orders(fd: int) -> str:
    """Waits for the orders of a server that started early; returns its key. Ends the process if
    there are none, because nobody needs it any more."""
    text = from_pipe(fd)
    if not text:
        sys.exit()
    orders: EarlyOrders = json.loads(text)
    _append_output_to(orders["log"])
    os.environ.update(orders["environment"])
    tempfile.tempdir = None  # found again: the orders have TMPDIR
    sys.argv[1:] = orders["arguments"]
    return orders["key"]


def _append_output_to(path: str) -> None:
    """Moves what was written into the file that is the standard output to the end of another, into
    which all further output goes."""
    sys.stdout.flush()
    log = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    written = os.fstat(sys.stdout.fileno()).st_size
    os.write(log, os.pread(sys.stdout.fileno(), written, 0))
    for stream in (sys.stdout, sys.stderr):
        os.dup2(log, stream.fileno())
    os.close(log)


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
