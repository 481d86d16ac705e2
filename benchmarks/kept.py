"""Kilobytes that the trainer keeps of a token and layer for the backward pass, by architecture.

In bfloat16, with the published settings of each class of docs/models.md, by the plan's own pass
over tensors without memory: of eager layers, and of compiled ones.
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
    print("| model | width | eager | compiled |\n|---|---|---|---|", flush=True)
    for title in titles:
        settings = without_noise(CLASSES[title].settings())
        width = settings.get_text_config().hidden_size
        kept = [f"{kept_per_token(settings, way) / 1024:.0f}" for way in ways]
        print(f"| {title} | {width} | {' | '.join(kept)} |", flush=True)


if __name__ == "__main__":
    main()
