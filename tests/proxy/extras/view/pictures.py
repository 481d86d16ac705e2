"""Takes the pictures of docs/view.md: each view in light and dark colours, and on a phone."""

from __future__ import annotations

import io
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.proxy.extras.view.chromium import Tab
from tests.proxy.extras.view.conftest import show

COLOURS = 256
"""Of a picture, which then has a third of its bytes."""
Views = Mapping[str, tuple[str, str]]
"""A view's name → its place (the part after `#`), and what is true once it is complete."""


@dataclass(frozen=True, slots=True)
class Look:
    suffix: str
    colours: str
    width: int = 1280
    height: int = 860
    phone: bool = False


LOOKS = (
    Look("", "light"),
    Look("-dark", "dark"),
    Look("-phone", "light", width=390, height=844, phone=True),
)


async def take_all(tab: Tab, views: Views, folder: Path) -> None:
    """Each view in each look, as `NAME.png`, `NAME-dark.png` and `NAME-phone.png`."""
    for look in LOOKS:
        await tab.colours(look.colours)
        await tab.size(look.width, look.height, phone=look.phone)
        for name, (place, ready) in views.items():
            await show(tab, place, ready)
            await take(tab, folder / f"{name}{look.suffix}.png")


async def take(tab: Tab, file: Path) -> None:
    """What the tab shows. A page that complains ends the program."""
    from PIL import Image  # here, because tests read the list of views where Pillow is missing

    picture = Image.open(io.BytesIO(await tab.picture()))
    few = picture.convert("RGB").quantize(COLOURS, Image.Quantize.MAXCOVERAGE)
    few.save(file, optimize=True)
    if tab.complaints:
        sys.exit("\n".join(tab.complaints))
