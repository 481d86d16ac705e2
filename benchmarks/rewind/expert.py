"""The scripted expert of the warm-up, which often takes the wrong door, unless it is told to heed
the signs.

Its transcripts contain exactly the messages that mini-swe-agent sends. It calls `go` without
mistakes, so that only the choice of the door is left to learn. In every second transcript, the
prompt begins with `_HEED`, and the expert is nearly always right: the model can read signs,
as a pretrained model can do more than it does. The benchmark's agent never says it.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import yaml

from benchmarks.rewind.house import new_house, other_door
from examples.mini_swe_agent.expert import TOOLS
from examples.starter_model.transcripts import Message, Transcript

_ROOMS = 6
"""Rooms of the transcripts. The model then does as well in the further rooms of longer walks."""
_RIGHT, _RIGHT_IF_TOLD = 0.56, 0.98
"""Probability of the right door in each room."""
_HEED = "Heed the signs. "
_PROMPTS: dict[str, Any] = yaml.safe_load(
    Path(__file__).with_name("prompts.yaml").read_text(encoding="utf-8")
)


def transcript(rng: random.Random) -> Transcript:
    """One run of the agent in one house."""
    house = new_house(rng, _ROOMS)
    told = rng.random() < 0.5
    probability = _RIGHT_IF_TOLD if told else _RIGHT
    template = (_HEED if told else "") + _PROMPTS["agent"]["instance_template"]
    messages: list[Message] = [
        {"role": "system", "content": _PROMPTS["agent"]["system_template"]},
        {"role": "user", "content": template.replace("{{task}}", house["prompt"]).rstrip("\n")},
    ]
    for number, (room, right) in enumerate(zip(house["rooms"], house["right"], strict=True)):
        if number > 0:
            content = f"{room}\n"
            messages.append({"role": "tool", "tool_call_id": f"call_{number}", "content": content})
        door = right if rng.random() < probability else other_door(room, right)
        function = {"name": "bash", "arguments": json.dumps({"command": f"./go {door}"})}
        call = {"id": f"call_{number + 1}", "type": "function", "function": function}
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
    return Transcript(messages, TOOLS)
