"""harbor-server with trials that end at once, as a process: arguments STATE_DIR TOKEN."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from harbor_sdk.server.app import build_app
from harbor_sdk.server.config import ServerConfig
from harbor_sdk.server.serve import _log_to_stderr, _serve
from tests.harbor_sdk.scripted_server import ScriptedTrials

if __name__ == "__main__":
    _log_to_stderr()
    config = ServerConfig(state_dir=Path(sys.argv[1]), token=sys.argv[2], port=0)
    sys.exit(asyncio.run(_serve(config, build_app(config, ScriptedTrials()))))
