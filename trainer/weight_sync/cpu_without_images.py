"""Lets a vLLM on CPU serve the text of models that can also read images, without `torchvision`.

vLLM's classes for Qwen3.5 and Qwen3-VL import two modules of transformers that prepare images and
videos, and these import `torchvision`, of which the package index has no build for CPUs. Here both
are imported once with empty modules in its place, which are removed again. Invariant: nothing else
finds a `torchvision`, and one that is installed is used.

Runs inside vLLM's processes.
"""

from __future__ import annotations

import functools
import sys
from importlib import import_module
from types import ModuleType

import torch

_ABSENT = (
    "torchvision",
    "torchvision.transforms",
    "torchvision.transforms.v2",
    "torchvision.transforms.v2.functional",
)
_NEEDED = (
    "transformers.models.qwen2_vl.image_processing_qwen2_vl",
    "transformers.models.qwen3_vl.video_processing_qwen3_vl",
)
"""What vLLM imports of transformers, which uses `torchvision` only when it prepares an image."""


@functools.cache
def install() -> None:
    """Imports the modules, in 15 ms, if torch has no CUDA and there is no `torchvision`."""
    from transformers.utils.import_utils import is_torchvision_available

    if torch.version.cuda is not None or is_torchvision_available():  # asked before it is there
        return
    modules = {name: ModuleType(name) for name in _ABSENT}
    for name, module in modules.items():
        module.__path__ = []
        package, _, last = name.rpartition(".")
        if package:
            setattr(modules[package], last, module)
    sys.modules.update(modules)
    try:
        for name in _NEEDED:
            import_module(name)
    finally:
        for name in modules:
            del sys.modules[name]
