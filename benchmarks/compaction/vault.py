"""The vault: in each room stands a word; all words together open the vault.

This module imports only the standard library, because the agent's process uses it.
"""

from __future__ import annotations

import random
from typing import Any

ROOMS = ("hall", "cellar", "attic", "tower")
WORDS = (
    *("amber", "brass", "coral", "ebony", "ivory", "jade", "pearl", "silver"),
    *("copper", "cotton", "granite", "linen", "marble", "birch", "quartz", "velvet"),
)
VAULT = "The vault. Say what you have seen."


def new_vault(rng: random.Random) -> dict[str, Any]:
    """A task's data: the `rooms` as the agent is shown them, and their `words`."""
    words = rng.choices(WORDS, k=len(ROOMS))
    rooms = [seen({room: word}) for room, word in zip(ROOMS, words, strict=True)]
    return {"prompt": "Go.", "rooms": rooms, "words": words}


def seen(words: dict[str, str]) -> str:
    """Rooms and their words, as they are shown, noted and said.

    Example: seen({"hall": "jade", "cellar": "birch"}) == "Seen: hall jade, cellar birch."
    """
    return f"Seen: {', '.join(f'{room} {word}' for room, word in words.items())}."
