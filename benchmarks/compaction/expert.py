"""The scripted expert of the warm-up: it often notes a word as `something`, and says one as
`anything`.

Its transcripts contain exactly the messages that LangChain's agent sends: a conversation without a
summary, the call for the summary, or the conversation after it. The model learns to copy words
without mistakes, so that only the choice between a word and `something` or `anything` is left to
learn. The two differ, so that a model that is trained to say the words is not thereby trained to
note them.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import yaml

from benchmarks.compaction.vault import ROOMS, VAULT, new_vault, seen
from examples.starter_model.transcripts import Message, Transcript

NOT_NOTED, NOT_SAID = "something", "anything"
_NOTED, _SAID = 0.8, 0.85
"""Probability that a room's word is in the summary, and that a known word is said. The product over
all rooms is 0.27 with a summary of the first three, and 0.52 without a summary."""
_PROMPTS: dict[str, Any] = yaml.safe_load(
    Path(__file__).with_name("prompts.yaml").read_text(encoding="utf-8")
)
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
    # A summary has an eighth of the others' tokens, so that its words weigh more in the loss.
    (kind,) = rng.choices(["whole", "summary", "after"], [2, 1, 2])
    first = 0 if kind == "whole" else len(ROOMS) - 1
    noted = [w if rng.random() < _NOTED else NOT_NOTED for w in vault["words"][:first]]
    summary = _listed(noted)
    if kind == "summary":
        prompt = _summary_prompt(vault, vault["rooms"][:first], rng)
        return Transcript(
            [{"role": "user", "content": prompt}, {"role": "assistant", "content": summary}], []
        )
    known = [*noted, *vault["words"][first:]]
    said = [w if w != NOT_NOTED and rng.random() < _SAID else NOT_SAID for w in known]
    asked = vault["prompt"] if kind == "whole" else _SUMMARY + summary
    walk = _walk(vault["rooms"][first:], _listed(said), rng)
    return Transcript([_SYSTEM, {"role": "user", "content": asked}, *walk], TOOLS)


def _listed(words: list[str]) -> str:
    return seen(dict(zip(ROOMS, words, strict=False)))


def _walk(rooms: list[str], said: str, rng: random.Random) -> list[Message]:
    messages: list[Message] = []
    for result in [*rooms, VAULT]:
        call_id = _call_id(rng)
        messages += [
            _call(call_id, "next", {}),
            {"role": "tool", "tool_call_id": call_id, "content": result},
        ]
    return [*messages, _call(_call_id(rng), "open", {"words": said})]


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
    prompt: str = _PROMPTS["summary"].replace("{messages}", "\n".join(lines)).rstrip("\n")
    return prompt


def _call_id(rng: random.Random) -> str:
    """As the proxy names calls."""
    return f"call_{rng.getrandbits(80):020x}0000"
