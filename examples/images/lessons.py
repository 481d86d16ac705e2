"""What the model sees in its warm-up: conversations of the two agents in which someone presses any
of the buttons."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from examples.claude_code.expert import REMINDER
from examples.images.screens import CELLS, PROMPT, Screen, place, screens

FILE = "screen.png"
ASK_CLAUDE_CODE = f"Read {FILE}. {PROMPT}"
SYSTEM = "You are a Claude agent, built on Anthropic's Claude Agent SDK.\nYou press buttons."
"""Claude Code's own first line, and what the configuration gives as --system-prompt."""
READ: list[dict[str, Any]] = json.loads(
    Path(__file__).with_name("read.json").read_text(encoding="utf-8")
)
"""What Claude Code offers with `--bare --tools=Read`."""

Messages = list[dict[str, Any]]
Conversation = tuple[Messages, list[dict[str, Any]], list[Screen]]
"""Messages, tools, and the screens in their order."""


def openai_sdk(rng: random.Random) -> Conversation:
    """What `agent.py` sends: a screen in each message."""
    messages: Messages = []
    shown = list(screens(_seed(rng)))
    for screen in shown:
        content = [{"type": "image"}, {"type": "text", "text": PROMPT}]
        messages += [
            {"role": "user", "content": content},
            {"role": "assistant", "content": place(rng.choice(screen.cells))},
        ]
    return messages, [], shown


def claude_code(rng: random.Random) -> Conversation:
    """What Claude Code sends, which reads the screen from a file."""
    day = date(2026, 1, 1) + timedelta(days=rng.randrange(1500))
    screen = next(screens(_seed(rng)))
    call = {"name": "Read", "arguments": {"file_path": FILE}}
    return (
        [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": REMINDER.format(date=day) + ASK_CLAUDE_CODE},
            {"role": "assistant", "content": "", "tool_calls": [{"function": call}]},
            {"role": "tool", "content": [{"type": "image"}]},
            {"role": "assistant", "content": place(rng.choice(screen.cells))},
        ],
        READ,
        [screen],
    )


AGENTS: dict[str, Callable[[random.Random], Conversation]] = {
    "openai-sdk": openai_sdk,
    "claude-code": claude_code,
}


def _seed(rng: random.Random) -> int:
    """Of no task."""
    return rng.randrange(1 << 40, 1 << 50)


class Lesson:
    """Batches of conversations, all of one length."""

    def __init__(
        self, processor: Any, conversation: Callable[[random.Random], Conversation], seed: int
    ) -> None:
        self._processor = processor
        self._conversation = conversation
        self._rng = random.Random(seed)
        self._header = self._tokens("<|im_start|>assistant\n")

    def batch(self, size: int) -> tuple[dict[str, Tensor], Tensor]:
        """What the model gets, and which tokens it is to say, `[size, T]` bool."""
        rows, images = [], []
        for _ in range(size):
            messages, tools, shown = self._conversation(self._rng)
            rows.append(self.ids(messages, tools))
            images += [screen.image() for screen in shown]
        ids = torch.tensor(rows)
        (image,) = self._tokens("<|image_pad|>")
        inputs = {
            "input_ids": ids,
            **self._processor.image_processor(images=images, return_tensors="pt"),
            "mm_token_type_ids": (ids == image).int(),
        }
        return inputs, torch.tensor([self._said(row) for row in rows])

    def ids(self, messages: Messages, tools: list[dict[str, Any]]) -> list[int]:
        text = self._processor.apply_chat_template(messages, tools=tools or None, tokenize=False)
        return self._tokens(text.replace("<|image_pad|>", "<|image_pad|>" * CELLS**2))

    def _said(self, row: list[int]) -> list[bool]:
        """What stands between an assistant's header and its end, the end included."""
        header, (end,) = self._header, self._tokens("<|im_end|>")
        said, is_said = [], False
        for at, token in enumerate(row):
            is_said = is_said or row[at - len(header) : at] == header
            said.append(is_said)
            is_said = is_said and token != end
        return said

    def _tokens(self, text: str) -> list[int]:
        return list(self._processor.tokenizer(text, add_special_tokens=False)["input_ids"])
