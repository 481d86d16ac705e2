"""Renders conversations as token ids, and reads answers.

The package `renderers` imports openai for an annotation of a client that nobody here uses. That
takes 0.9 s of processor time of each process, so here it gets a stand-in, unless openai is loaded
already.
"""

import importlib
import sys
from types import ModuleType


def _import_renderers() -> None:
    if "renderers" in sys.modules or "openai" in sys.modules:
        return
    stand_in = ModuleType("openai")
    stand_in.AsyncOpenAI = object  # type: ignore[attr-defined]
    sys.modules["openai"] = stand_in
    try:
        importlib.import_module("renderers")
    finally:
        del sys.modules["openai"]


_import_renderers()
