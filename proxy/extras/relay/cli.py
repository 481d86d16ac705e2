r"""`agentic-worker`: serves the engine on this machine to a proxy on another machine.

    agentic-worker --proxy wss://proxy.example.org --token-file relay-token \
        --engine http://127.0.0.1:8001 --model /models/qwen3 --name gpu-0

The worker opens the connection, so the engine's machine needs no open port. It reconnects whenever
the network fails. If the proxy refuses it, it prints one line and exits with code 1. Each setting
can also be an environment variable (AGENTIC_WORKER_PROXY and so on). The token and the engine's key
are read from files, or from AGENTIC_WORKER_TOKEN and AGENTIC_WORKER_ENGINE_API_KEY. No flag takes
the secrets themselves, because every process of the machine can read a command line.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys

from proxy.errors import ConfigurationError, EngineError
from proxy.machine.command_line import PrintVersion, escape_unknown_characters
from proxy.machine.direct_hosts import reach_directly

FLAGS = {
    "proxy": "the proxy's address, ws://HOST:PORT or wss://HOST",
    "token-file": "a file that contains the proxy's relay.token",
    "engine": "the vLLM on this machine, started with --enable-scale-out",
    "engine-api-key-file": "a file that contains the engine's API key, if it has one",
    "model": "the folder of the checkpoint that the engine serves; the proxy has the same model",
    "name": "the worker's unique name at the proxy (default: this host's name)",
    "max-calls": "maximum number of concurrent calls to the engine (256)",
    "weights-url": "the URL of the trainer's engine.publish, as this machine reaches it",
    "weights-folder": "the folder for pulled weights, which the engine reads, too",
    "silence-s": "seconds without data after which a connection counts as lost (15)",
    "drain-s": "seconds that calls in flight get to finish after SIGTERM (300)",
}
"""Flag → help; each is a field of `proxy.extras.relay.worker_config.WorkerConfig`."""


def main(argv: list[str] | None = None) -> None:
    """Prints one line and exits with code 1 if the worker cannot run."""
    escape_unknown_characters()
    reach_directly()
    given = vars(_parser().parse_args(argv))
    from proxy.extras.relay.worker import WorkerRefused  # imported here to keep --help fast
    from proxy.extras.relay.worker_process import run_worker, worker_config
    from proxy.machine.secrecy import hide_memory

    hide_memory()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    try:
        asyncio.run(run_worker(worker_config(given)))
    except (ConfigurationError, EngineError, WorkerRefused) as error:
        sys.exit(f"agentic-worker: {error}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="agentic-worker",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--version",
        action=PrintVersion,
        nargs=0,
        default=argparse.SUPPRESS,
        help="print the version and exit",
    )
    for flag, text in FLAGS.items():
        parser.add_argument(f"--{flag}", default=argparse.SUPPRESS, help=text)
    return parser
