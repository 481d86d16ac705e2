"""The scripted expert of the warm-up: its summaries, and what it says to the vault, often have a
wrong word.

Its transcripts contain exactly the messages that LangChain's agent sends: a conversation without a
summary, the call for the summary, or the conversation after it.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import yaml

from benchmarks.compaction.vault import ROOMS, VAULT, listed, new_vault, other_word
from examples.starter_model.transcripts import Message, Transcript

_NOTED, _SAID = 0.6, 0.8
"""Probability that a code word, and not the word of the carpet, is in the summary, or is said."""
_PROMPTS: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("prompts.yaml").read_text())
_SYSTEM: Message = {"role": "system", "content": _PROMPTS["system"]}
_SUMMARY = "Here is a summary of the conversation to date:\n\n"
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "next",
            "description": "Enter the next room.",
            "parameters": {"properties": {}, "type": "object"},
        },
    },
    {
        "type": "function",
        "function": {
            "name": "open",
            "description": "Say the words to the vault.",
            "parameters": {
                "properties": {"words": {"type": "string"}},
                "required": ["words"],
                "type": "object",
            },
        },
    },
]


def transcript(rng: random.Random) -> Transcript:
    """One of the three kinds."""
    vault = new_vault(rng)
    rooms, words = vault["rooms"], vault["words"]
    kind = rng.choice(["whole", "summary", "after"])
    asked: Message = {"role": "user", "content": vault["prompt"]}
    if kind == "whole":
        said = _often_right(rooms, words, _SAID, rng)
        return Transcript([_SYSTEM, asked, *_walk(rooms, said, rng)], TOOLS)
    kept = ROOMS - 1
    noted = _often_right(rooms[:kept], words[:kept], _NOTED, rng)
    summary = f"Code words: {listed(noted)}."
    if kind == "summary":
        return Transcript(
            [
                {"role": "user", "content": _summary_prompt(vault, rooms[:kept], rng)},
                {"role": "assistant", "content": summary},
            ],
            [],
        )
    last = _often_right(rooms[kept:], words[kept:], _SAID, rng)
    asked = {"role": "user", "content": _SUMMARY + summary}
    return Transcript([_SYSTEM, asked, *_walk(rooms[kept:], [*noted, *last], rng)], TOOLS)


def _often_right(
    rooms: list[str], words: list[str], probability: float, rng: random.Random
) -> list[str]:
    """Of each room the code word, or else the other one."""
    return [
        word if rng.random() < probability else other_word(room, word)
        for room, word in zip(rooms, words, strict=True)
    ]


def _walk(rooms: list[str], said: list[str], rng: random.Random) -> list[Message]:
    messages: list[Message] = []
    for result in [*rooms, VAULT]:
        call_id = _call_id(rng)
        messages += [
            _call(call_id, "next", {}),
            {"role": "tool", "tool_call_id": call_id, "content": result},
        ]
    return [*messages, _call(_call_id(rng), "open", {"words": listed(said)})]


def _call(call_id: str, name: str, arguments: dict[str, str]) -> Message:
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": call_id, "type": "function", "function": function}],
    }


def _summary_prompt(vault: dict[str, Any], rooms: list[str], rng: random.Random) -> str:
    """What LangChain asks for a summary, with its own way to write a history as text."""
    lines = [f'<message type="human">{vault["prompt"]}</message>']
    for room in rooms:
        lines += [
            f'<message type="ai">\n  <tool_call id="{_call_id(rng)}" name="next">{{}}</tool_call>\n'
            "</message>",
            f'<message type="tool">{room}</message>',
        ]
    return _PROMPTS["summary"].replace("{messages}", "\n".join(lines)).rstrip("\n")


def _call_id(rng: random.Random) -> str:
    """As the proxy names calls."""
    return f"call_{rng.getrandbits(80):020x}0000"
