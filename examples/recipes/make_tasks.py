"""Writes small SWE-type tasks as Harbor task folders: a repository with a fault, and hidden tests.

`python -m examples.recipes.make_tasks --out DIR` makes DIR/train and DIR/heldout; with
`--pictures`, the report of each fault is a picture. Invariant: the repository of a task differs
from `repository/` in the task's fault alone, and in that picture, so `repository/` is the solution
of every task. The verifier gives 1 if the hidden test passes and the tests that passed before still
do; it uses Python's `unittest` and its own copies of both, whatever the agent edits.
"""

from __future__ import annotations

import argparse
import shutil
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

_HERE = Path(__file__).parent
REPOSITORY = _HERE / "repository"
_TOML = """schema_version = "1.4"

[task]
name = "shelf/{name}"

[agent]
timeout_sec = 1800

[verifier]
timeout_sec = 120
"""
_DOCKERFILE = "FROM python:3.11-slim\nWORKDIR /app\nCOPY repository/ ./\n"
_INSTRUCTION = """{report}

The repository is in /app; `python3 -m unittest` runs its tests. Find the cause in the package
`shelf` and mend it there.
"""
_PICTURE = "report.png"
_SHOWN = f"The report of the fault is a picture: @/app/{_PICTURE}"
"""Claude Code reads a file that follows an `@` before its first call; others have a tool for it."""
_SOLVE = "#!/bin/bash\ncp /solution/{file} /app/shelf/{file}\n"
_VERIFY = """#!/bin/bash
# `fixed`: the hidden test passes; `kept`: what worked still does. Both make the reward.
cd /tests
timeout 50 python3 -I run.py hidden_test > /logs/verifier/hidden.txt 2>&1
[ $? = 7 ] && fixed=1 || fixed=0
timeout 50 python3 -I run.py visible_test > /logs/verifier/visible.txt 2>&1
[ $? = 7 ] && kept=1 || kept=0
echo "{\\"reward\\": $((fixed * kept)), \\"fixed\\": $fixed, \\"kept\\": $kept}" \\
  > /logs/verifier/reward.json
"""
_HIDDEN = """import unittest

from shelf.prices import format_price, parse_price, split_price
from shelf.reservations import free_days, merged, overlap
from shelf.stock import NotEnough, Stock


class Hidden(unittest.TestCase):
    def test_hidden(self):
"""


@dataclass(frozen=True, slots=True)
class Fault:
    """Example: Fault("overlap", "reservations.py", "first <= end", "first < end", "…", ("…",))"""

    name: str
    file: str
    """Of the package `shelf`."""
    right: str
    wrong: str
    report: str
    """What a user of the package would write."""
    hidden: Sequence[str]
    """The lines of the hidden test."""
    heldout: bool = False


FAULTS = (
    Fault(
        "price-of-one-digit",
        "prices.py",
        'cents.ljust(2, "0")',
        'cents or "0"',
        "`parse_price('12.5')` gives 12.05, not 12.50.",
        (
            'self.assertEqual(parse_price("12.5"), 1250)',
            'self.assertEqual(parse_price("0.05"), 5)',
            'self.assertEqual(parse_price("7"), 700)',
        ),
    ),
    Fault(
        "negative-price",
        "prices.py",
        "divmod(abs(cents), 100)",
        "divmod(cents, 100)",
        "A credit of 3.07 is printed as `--4.93`.",
        (
            'self.assertEqual(format_price(-307), "-3.07")',
            'self.assertEqual(format_price(-123450), "-1,234.50")',
        ),
    ),
    Fault(
        "order-taken-in-part",
        "stock.py",
        """            if pieces > self.count(article):
                raise NotEnough(f"{article}: {self.count(article)} of {pieces}")
        for article, pieces in order.items():
            self.take(article, pieces)""",
        """            self.take(article, pieces)""",
        "After an order of 2 pens and 1 ink failed because there was no ink, the 2 pens were gone "
        "from the stock, too.",
        (
            "stock = Stock()",
            'stock.add("pen", 2)',
            "with self.assertRaises(NotEnough):",
            '    stock.take_all({"pen": 2, "ink": 1})',
            'self.assertEqual(stock.count("pen"), 2)',
            'stock.take_all({"pen": 2})',
            "self.assertEqual(stock.articles(), [])",
        ),
    ),
    Fault(
        "adjacent-periods",
        "reservations.py",
        "first <= result[-1][1]",
        "first < result[-1][1]",
        "Two reservations, days 1 to 2 and days 3 to 4, are not shown as one of days 1 to 4.",
        (
            "self.assertEqual(merged([(3, 5), (1, 3)]), [(1, 5)])",
            "self.assertEqual(merged([(1, 2), (3, 4)]), [(1, 2), (3, 4)])",
        ),
    ),
    Fault(
        "period-inside-another",
        "reservations.py",
        "max(end, result[-1][1])",
        "end",
        "With a reservation of a week and one of a single day in that week, the rest of the week "
        "counts as free.",
        (
            "self.assertEqual(merged([(1, 8), (2, 3)]), [(1, 8)])",
            "self.assertEqual(free_days([(1, 8), (2, 3)], 0, 10), 3)",
        ),
        heldout=True,
    ),
    Fault(
        "split-loses-cents",
        "prices.py",
        "[each + 1] * left + [each] * (parts - left)",
        "[each] * parts",
        "An invoice of 10.00 that three people share adds up to 9.99.",
        (
            "self.assertEqual(split_price(1000, 3), [334, 333, 333])",
            "self.assertEqual(sum(split_price(1001, 7)), 1001)",
        ),
        heldout=True,
    ),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--pictures", action="store_true", help="the reports are pictures")
    given = parser.parse_args()
    for split in ("train", "heldout"):
        shutil.rmtree(given.out / split, ignore_errors=True)
    for fault in FAULTS:
        split = "heldout" if fault.heldout else "train"
        write_task(given.out / split, fault, picture=given.pictures)


def write_task(root: Path, fault: Fault, *, picture: bool = False) -> Path:
    """Writes one task; returns its folder. Raises ValueError if `right` is not in the file once."""
    folder = root / fault.name
    for part in ("environment", "tests", "solution"):
        (folder / part).mkdir(parents=True)
    copy = folder / "environment/repository"
    shutil.copytree(REPOSITORY, copy, ignore=shutil.ignore_patterns("__pycache__"))
    right = (REPOSITORY / "shelf" / fault.file).read_text(encoding="utf-8")
    if right.count(fault.right) != 1:
        raise ValueError(f"{fault.name}: {fault.file} has {fault.right!r} not once")
    (copy / "shelf" / fault.file).write_text(
        right.replace(fault.right, fault.wrong), encoding="utf-8"
    )
    if picture:
        drawn(fault.report).save(copy / _PICTURE)
    files = {
        "task.toml": _TOML.format(name=fault.name),
        "instruction.md": _INSTRUCTION.format(report=_SHOWN if picture else fault.report),
        "environment/Dockerfile": _DOCKERFILE,
        "solution/solve.sh": _SOLVE.format(file=fault.file),
        f"solution/{fault.file}": right,
        "tests/test.sh": _VERIFY,
        "tests/run.py": (_HERE / "run_tests.py").read_text(encoding="utf-8"),
        "tests/hidden_test.py": _HIDDEN + "".join(f"        {line}\n" for line in fault.hidden),
        "tests/visible_test.py": (REPOSITORY / "tests/test_shelf.py").read_text(encoding="utf-8"),
    }
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    return folder


def drawn(report: str) -> Image.Image:
    """A report as one sees it on a screen."""
    lines = textwrap.wrap(report, 64)
    image = Image.new("RGB", (640, 32 + 28 * len(lines)), "white")
    font = ImageFont.load_default(18)
    ImageDraw.Draw(image).multiline_text((16, 16), "\n".join(lines), "black", font, spacing=10)
    return image


if __name__ == "__main__":
    main()
