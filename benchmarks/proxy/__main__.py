"""`make bench-proxy`: ours beside a bare pass-through, LiteLLM and Portkey, on the same fake vLLM.

All in one run on one machine, so the ratios mean something where the absolute figures do not.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from benchmarks.proxy import small_calls, targets

CACHE = Path(".cache/bench-proxy")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=8.0, help="per cell")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--only", nargs="+", choices=["ours", "pass-through", "litellm", "portkey"])
    arguments = parser.parse_args()
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch, targets.fake_vllm() as upstream:
        starters: dict[str, Callable[[], AbstractContextManager[targets.Target]]] = {
            "pass-through": lambda: targets.pass_through(upstream),
            "ours": lambda: targets.ours(upstream, Path(scratch)),
            "portkey": lambda: targets.portkey(upstream, CACHE),
            "litellm": lambda: targets.litellm(upstream, CACHE),
        }
        direct = {
            n: small_calls.run_load(f"{upstream}/v1/chat/completions", {}, n, arguments.seconds)
            for n in arguments.clients
        }
        cells: list[small_calls.Cell] = []
        for name, start in starters.items():
            if arguments.only and name not in arguments.only:
                continue
            with start() as target:
                cells += [
                    small_calls.measure(target, n, arguments.seconds) for n in arguments.clients
                ]
        print(small_calls.table(direct, cells))


if __name__ == "__main__":
    main()
