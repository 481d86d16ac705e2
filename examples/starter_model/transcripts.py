"""Transcripts of an expert, and the tokens that the proxy would have recorded for them.

Invariant: `encode` builds the tokens in the way in which a recorded session grows: prompt,
completion, bridge to the next prompt, completion, … with the same `renderers` package. Warm-up and
reinforcement learning therefore see the same tokens.
"""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Message = dict[str, Any]


@dataclass(frozen=True)
class Transcript:
    """One conversation in the chat-completions shape, ending with an assistant message.

    Example: Transcript(tools=[{"type": "function", …}],
                        messages=[{"role": "user", …}, {"role": "assistant", …}])
    """

    messages: list[Message]
    tools: list[dict[str, Any]]


Expert = Callable[[random.Random], Transcript]


@dataclass(frozen=True)
class Encoded:
    """`ids` `[T]`; `mask` `[T]`, True where the expert chose the token in place of the policy."""

    ids: npt.NDArray[np.int64]
    mask: npt.NDArray[np.bool_]


def load_expert(name: str) -> Expert:
    """The function that `module:function` names. Raises ValueError if it does not exist."""
    module_name, _, function = name.partition(":")
    try:
        expert: Expert = getattr(importlib.import_module(module_name), function)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"--expert {name!r}: {error}; give it as module:function") from error
    return expert


def encode(transcript: Transcript, renderer: Any) -> Encoded:
    """The tokens of a session in which the engine sampled the transcript's assistant messages."""
    messages, tools = transcript.messages, transcript.tools
    first = next(i for i, message in enumerate(messages) if message["role"] == "assistant")
    ids = list(
        renderer.render_ids(messages[:first], tools=tools or None, add_generation_prompt=True)
    )
    mask = [False] * len(ids)
    while True:
        sampled = completion_ids(messages[first], renderer)
        following = _next_assistant(messages, first + 1)
        if following is None:
            ids, mask = ids + sampled, mask + [True] * len(sampled)
            return Encoded(np.array(ids, np.int64), np.array(mask, np.bool_))
        bridged = renderer.bridge_to_next_turn(
            ids, sampled, messages[first + 1 : following], tools=tools or None
        )
        if bridged is None:
            raise ValueError(f"no exact bridge to message {following} of {messages!r}")
        mask = mask + [True] * len(sampled)
        mask += [False] * (len(bridged.token_ids) - len(mask))
        ids, first = list(bridged.token_ids), following


def completion_ids(message: Message, renderer: Any) -> list[int]:
    """The ids that an engine would have sampled for `message`, including the end of turn."""
    # Between two questions, the template adds no thinking block.
    question = {"role": "user", "content": "?"}
    rendered = renderer.render([question, message, question])
    return [
        i for i, chosen in zip(rendered.token_ids, rendered.sampled_mask, strict=True) if chosen
    ]


def _next_assistant(messages: list[Message], start: int) -> int | None:
    return next(
        (i for i in range(start, len(messages)) if messages[i]["role"] == "assistant"), None
    )
