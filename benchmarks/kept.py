"""Kilobytes that the trainer keeps of a token and layer for the backward pass, by architecture.

In bfloat16, with the published settings of each class of docs/models.md, by the plan's own pass
over tensors without memory: of eager layers, and of compiled ones; also as for a width of 2,048,
because most of it grows with the width. Layers of the delta rule have fla's kernels.
"""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path

from transformers.utils import logging

from tests.trainer.policy.architectures import ARCHITECTURES
from trainer.policy.architecture import without_noise
from trainer.policy.memory import kept_per_token
from trainer.policy.model_config import ModelConfig

CLASSES = {each.title: each for each in ARCHITECTURES if not each.refused}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kept", description=__doc__)
    parser.add_argument("--classes", nargs="+", choices=CLASSES, default=list(CLASSES))
    titles = parser.parse_args().classes
    logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    eager = ModelConfig(path=Path("unused"), compute_dtype="bfloat16")
    ways = (eager, eager.model_copy(update={"compile_layers": True}))
    print("| model | width | eager | compiled | as for 2,048 |\n|---|---|---|---|---|", flush=True)
    for title in titles:
        settings = without_noise(CLASSES[title].settings())
        width = settings.get_text_config().hidden_size
        kept = [kept_per_token(settings, way, kernels=True) / 1024 for way in ways]
        shown = " | ".join(f"{each:.0f}" for each in (*kept, kept[-1] * 2048 / width))
        print(f"| {title} | {width} | {shown} |", flush=True)


if __name__ == "__main__":
    main()
