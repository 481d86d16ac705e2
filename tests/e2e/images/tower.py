"""Each kind of weight of a model that reads images, its tower's too, sent alone to a real vLLM.

PYTHONPATH=.cache/torchvision:. python -m tests.e2e.images.tower gemma3

A kind is all tensors whose names differ in numbers only. Prints as JSON the kinds; those with
which the engine does not compute what a fresh load of them computes (`wrong`); and those without
which it accepts an update (`accepted`).
"""

from __future__ import annotations

import json
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.e2e.images.checkpoints import MODELS
from tests.e2e.test_weight_dtypes import digests, serving, updating
from tests.e2e.weight_kinds import changed, kind_of
from trainer.errors import WeightSyncError
from trainer.optimizer_config import OptimizerConfig
from trainer.policy.model_config import ModelConfig
from trainer.policy.policy import Policy


def found(kind: str, folder: Path) -> dict[str, Any]:
    dtype = "bfloat16" if kind == "qwen3_5" else "float32"
    policy = Policy(ModelConfig(path=folder, vision="trained"), OptimizerConfig())
    weights = {
        name: tensor.to(getattr(torch, dtype)) for name, tensor in policy.named_hf_parameters()
    }
    file = folder.with_suffix(".safetensors")
    kinds = sorted({kind_of(name) for name in weights})
    wrong, accepted = [], []
    more = ["--no-skip-tokenizer-init"]
    with serving(folder, [dtype], more=more) as urls, updating(*urls) as sync:
        for number, each in enumerate(kinds, 1):
            sent = changed(weights, each, number)
            save_file({name: tensor.contiguous() for name, tensor in sent.items()}, file)
            sync.push(sent.items(), number)
            (expected,) = sync.control.call_workers("fresh_digest", str(file))
            if digests(sync) != expected:
                wrong.append(each)
        for each in kinds:
            rest = [(name, tensor) for name, tensor in weights.items() if kind_of(name) != each]
            with suppress(WeightSyncError):
                sync.push(rest, 1000)
                accepted.append(each)
            sync.control.resume()
    return {"kinds": kinds, "wrong": wrong, "accepted": accepted}


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder, sys.argv[1])
        MODELS[sys.argv[1]](checkpoint)
        sys.stdout.write(json.dumps(found(sys.argv[1], checkpoint)))


if __name__ == "__main__":
    main()
