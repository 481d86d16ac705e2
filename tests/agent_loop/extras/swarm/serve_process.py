"""A swarm server as a process: arguments ADDRESS STATE_DIR and the trainer's command."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from agent_loop.extras.swarm.serve import ServeOptions, serve

if __name__ == "__main__":
    address, state, *trainer = sys.argv[1:]
    options = ServeOptions(address, Path(state), trainer)
    asyncio.run(serve(options, lambda url: print(url, flush=True)))
