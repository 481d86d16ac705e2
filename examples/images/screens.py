"""The screens of the agent's app: a number on a button, which is to be typed.

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
DIGITS = 8
"""The digits 1 to 8."""
SCREENS = 2
"""Screens of a task: the next one appears when something is typed."""
PROMPT = "Type the number on the button."


@dataclass(frozen=True)
class Screen:
    """Example: Screen(digit=7, seed=12345)"""

    digit: int
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
        x, y = (rng.randrange(CELLS) * CELL_PIXELS + rng.randint(2, 4) for _ in range(2))
        colour = tuple(rng.randint(20, 110) for _ in range(3))
        draw.rounded_rectangle((x, y, x + 25, y + 25), 4, colour)
        font = ImageFont.load_default(24)
        draw.text((x + 6, y - 2), str(self.digit), (255, 255, 255), font)
        return image

    def png(self) -> bytes:
        file = io.BytesIO()
        self.image().save(file, "PNG")
        return file.getvalue()

    def is_typed(self, answer: str) -> bool:
        return answer.strip() == str(self.digit)


def screens(seed: int) -> Iterator[Screen]:
    """The screens of a task."""
    rng = random.Random(seed)
    for _ in range(SCREENS):
        yield Screen(rng.randint(1, DIGITS), rng.randrange(1 << 30))
