"""`agentic-train relay-worker` with a scripted engine instead of vLLM.

python relay_node_script.py [repeat|no-gpu|silent]

`repeat` writes its standard input to its log, as a terminal does; `no-gpu` ends with an error;
`silent` never connects.
"""

from __future__ import annotations

import signal
import sys

from proxy.engines.vllm_server import VllmServer


class ScriptedServer(VllmServer):
    def command(self, key_fd: int) -> list[str]:
        return [sys.executable, "-m", "proxy.testing.scripted_engine", "--port", str(self.port)]


def main(mode: str) -> int:
    if mode == "repeat":
        line = sys.stdin.readline()
        print(line, flush=True)
        return 1
    if mode == "no-gpu":
        print("loading\nRuntimeError: no CUDA device", flush=True)
        return 3
    if mode == "silent":
        print("still loading", flush=True)
        signal.pause()
    from trainer.commands.runs import reporting
    from trainer.extras.relay import node as relay_node  # takes seconds

    return reporting("node", lambda: relay_node.serve_from_stdin(ScriptedServer))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:] or [""]))
