"""vLLM's API server with a key that only its process knows.

    python -m proxy.engines.vllm_launch FD ARGUMENTS…

The key is read from the descriptor FD. vLLM takes its own key by argument or environment only,
which every process of the same user can read.
"""

from __future__ import annotations

import runpy
import sys

from proxy.engines.vllm_key import RequireKey
from proxy.secrecy import from_pipe

MODULE = "vllm.entrypoints.openai.api_server"
"""The module, not the `vllm` command: that one fails with the CPU distribution."""


def main() -> None:
    RequireKey.key = from_pipe(int(sys.argv[1]))
    del sys.argv[1]
    runpy.run_module(MODULE, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
