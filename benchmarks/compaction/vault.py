"""The vault: in each room stand a code word and another word; the code words open the vault.

This module imports only the standard library, because the agent's process uses it.
"""

from __future__ import annotations

import random
from typing import Any

ROOMS = 4
WORDS = ("amber", "brass", "coral", "ebony", "ivory", "jade", "pearl", "silver")
VAULT = "The vault. Say all code words."


def new_vault(rng: random.Random) -> dict[str, Any]:
    """A task's data: the `rooms` as the agent is shown them, and the code `words`."""
    rooms, words = [], []
    for number in range(1, ROOMS + 1):
        word, carpet = rng.sample(WORDS, 2)
        words.append(word)
        both = [f"Code word: {word}.", f"Carpet: {carpet}."]
        rng.shuffle(both)
        rooms.append(f"Room {number}. {both[0]} {both[1]}")
    return {"prompt": "Go.", "rooms": rooms, "words": words}


def listed(words: list[str]) -> str:
    """The words as they are to be said. Example: "room 1 jade, room 2 pearl\""""
    return ", ".join(f"room {number} {word}" for number, word in enumerate(words, 1))


def other_word(room: str, word: str) -> str:
    """The word of a room, as it is shown, that is not its code word."""
    return next(other for other in WORDS if other != word and f" {other}." in room)
