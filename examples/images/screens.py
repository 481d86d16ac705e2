"""The screens of the agent's app: three buttons, of which the green one is to be pressed.

Everything follows from a task's seed, so a task is one number, and the agent, the grader and the
warm-up of the model draw the same screens.
"""

from __future__ import annotations

import io
import random
from collections.abc import Iterator
from dataclasses import dataclass

from PIL import Image, ImageDraw, ImageFont

CELLS = 3
CELL_PIXELS = 32
SCREENS = 2
"""Screens of a task: the next one appears when a button is pressed."""
COLOURS = {"green": (30, 150, 60), "red": (200, 50, 50), "blue": (50, 90, 200)}
"""Of the buttons, the right one first."""


def ask(colour: str) -> str:
    return f"Press the {colour} button. Answer with its column and row."


PROMPT = ask("green")


@dataclass(frozen=True)
class Screen:
    """Example: Screen(cells=(4, 0, 7), seed=12345)"""

    cells: tuple[int, ...]
    """Where the buttons are, the right one first: 0 is the upper left, 8 the lower right."""
    seed: int
    """Of what else is on the screen."""

    def image(self) -> Image.Image:
        rng = random.Random(self.seed)
        size = CELLS * CELL_PIXELS
        image = Image.new("RGB", (size, size), (rng.randint(225, 255),) * 3)
        draw = ImageDraw.Draw(image)
        for _ in range(4):  # lines of text, as far as one can see
            x, y = rng.randrange(size - 40), rng.randrange(size)
            draw.line((x, y, x + rng.randint(10, 40), y), (rng.randint(170, 210),) * 3, 2)
        font = ImageFont.load_default(20)
        for cell, colour in zip(self.cells, COLOURS.values(), strict=True):
            x, y = (CELL_PIXELS * n + rng.randint(2, 4) for n in (cell % CELLS, cell // CELLS))
            shade = tuple(part + rng.randint(-25, 25) for part in colour)
            draw.rounded_rectangle((x, y, x + 25, y + 25), 4, shade)
            draw.text((x + 7, y), str(rng.randint(1, 9)), (255, 255, 255), font)
        return image

    def png(self) -> bytes:
        file = io.BytesIO()
        self.image().save(file, "PNG")
        return file.getvalue()

    def is_pressed(self, answer: str) -> bool:
        return answer.strip() == place(self.cells[0])


def place(cell: int) -> str:
    """What is answered to press a cell. Example: place(5) == "3,2" """
    return f"{cell % CELLS + 1},{cell // CELLS + 1}"


def screens(seed: int) -> Iterator[Screen]:
    """The screens of a task."""
    rng = random.Random(seed)
    for _ in range(SCREENS):
        cells = rng.sample(range(CELLS**2), len(COLOURS))
        yield Screen(tuple(cells), rng.randrange(1 << 30))
