"""Compiled layers beside eager ones, for each architecture of docs/models.md, on a CPU.

Tiny models, whose graphs torch divides as on a GPU and runs by its own operations: the largest
difference of a log-probability and of a gradient, graphs after one length and after three, the
reasons for which graphs end, and the bytes that are kept. `--rows FILE` keeps the rows, and goes on
after them.
"""

from __future__ import annotations

import argparse
import json
import warnings
from pathlib import Path
from typing import Any

import torch
from torch._dynamo.utils import counters
from transformers.utils import logging

from proxy.run_files.files import read_jsonl
from tests.trainer.policy.test_compiled_layers import TOLERANCES, TRAINED, compared

CLASSES = {each.title: each for each in TRAINED}
COLUMNS = ("Δ log p", "Δ gradient", "graphs", "breaks", "kept ÷ eager")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.compiled_layers", description=__doc__
    )
    parser.add_argument("--classes", nargs="+", choices=CLASSES, default=list(CLASSES))
    parser.add_argument("--rows", type=Path, default=Path("-"), help="a file that keeps the rows")
    given = parser.parse_args()
    logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    known = {(each["model"], each["type"]): each for each in read_jsonl(given.rows)}
    print(f"| model | type | {' | '.join(COLUMNS)} |\n|{'---|' * (2 + len(COLUMNS))}", flush=True)
    for title in given.classes:
        rows = [row for (model, _), row in known.items() if model == title]
        if not rows:
            rows = _rows(title)
            if given.rows != Path("-"):
                with given.rows.open("a", encoding="utf-8") as file:
                    file.writelines(json.dumps(row) + "\n" for row in rows)
        for row in rows:
            cells = [str(row[column]) for column in COLUMNS]
            print(f"| {title} | {row['type']} | {' | '.join(cells)} |", flush=True)


def _rows(title: str) -> list[dict[str, Any]]:
    return [_row(title, dtype) for dtype in TOLERANCES]


def _row(title: str, dtype: torch.dtype) -> dict[str, Any]:
    torch._dynamo.reset()
    counters.clear()
    each = compared(CLASSES[title], dtype)
    return {
        "model": title,
        "type": str(dtype).removeprefix("torch."),
        "Δ log p": f"{each.logprobs:.0e}",
        "Δ gradient": f"{each.gradients:.0e}",
        "graphs": " then ".join(map(str, each.graphs)),
        "breaks": "; ".join(sorted(map(_short, {*each.breaks, *each.refused}))) or "none",
        "kept ÷ eager": f"{each.kept[0] / each.kept[1]:.2f}",
    }


def _short(reason: str) -> str:
    return reason.strip().splitlines()[0].replace("|", "/")


if __name__ == "__main__":
    main()
