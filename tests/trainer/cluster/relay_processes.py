"""The command of a relay worker with a scripted engine."""

from __future__ import annotations

import sys
from pathlib import Path

SCRIPT = (sys.executable, str(Path(__file__).with_name("relay_node_script.py")))
ALONE = {"replicas": 0}
"""Section `engine` of a run whose engines are all behind the relay."""
