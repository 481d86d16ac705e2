"""vLLM's class of Qwen3.5 can be imported without `torchvision`, which stays absent."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec

import pytest

SCRIPT = """
import sys
from importlib.util import find_spec
from trainer.weight_sync import cpu_without_images
if sys.argv[1] == "installed":
    cpu_without_images.install()
assert find_spec("torchvision") is None
import vllm.model_executor.models.qwen3_5
"""


@pytest.mark.slow
@pytest.mark.skipif(find_spec("torchvision") is not None, reason="torchvision is installed")
@pytest.mark.parametrize("argument", ["installed", "not installed"])
def test_qwen3_5_is_imported_in_place_of_its_image_processing(argument: str) -> None:
    command = [sys.executable, "-c", SCRIPT, argument]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode == 0) == (argument == "installed"), done.stderr
    assert ("No module named 'torchvision'" in done.stderr) == (argument != "installed")
