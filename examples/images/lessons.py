"""What the model sees in its warm-up: conversations of the two agents in which someone presses any
of the buttons. Before Claude Code's, it sees shorter ones in which it learns colours: someone who
is asked for the red or the blue button presses it, and someone who is asked for the green one
presses it in half of the cases."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from datetime import date, timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from examples.claude_code.expert import REMINDER
from examples.images.screens import CELLS, COLOURS, PROMPT, Screen, ask, place, screens

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
Presses = Callable[[random.Random, Screen], tuple[str, int]]
"""What someone is asked for on a screen, and the cell that they press."""


def any_button(rng: random.Random, screen: Screen) -> tuple[str, int]:
    return PROMPT, rng.choice(screen.cells)


def by_colour(rng: random.Random, screen: Screen) -> tuple[str, int]:
    """The button that is asked for, but of the green one another in half of the cases."""
    asked, cell = asked_button(rng, screen)
    if cell == screen.cells[0] and rng.random() < 0.5:
        cell = rng.choice(screen.cells[1:])
    return asked, cell


def asked_button(rng: random.Random, screen: Screen) -> tuple[str, int]:
    colour, cell = rng.choice(list(zip(COLOURS, screen.cells, strict=True)))
    return ask(colour), cell


def openai_sdk(rng: random.Random, presses: Presses = any_button) -> Conversation:
    """What `agent.py` sends: a screen in each message."""
    shown = list(screens(_seed(rng)))
    messages: Messages = []
    for asked, cell in (presses(rng, screen) for screen in shown):
        content = [{"type": "image"}, {"type": "text", "text": asked}]
        messages += [
            {"role": "user", "content": content},
            {"role": "assistant", "content": place(cell)},
        ]
    return messages, [], shown


def with_colours(rng: random.Random, presses: Presses = by_colour) -> Conversation:
    """The same, but someone is asked for one of the three buttons."""
    return openai_sdk(rng, presses)


def claude_code(rng: random.Random, presses: Presses = by_colour) -> Conversation:
    """What Claude Code sends, which reads the screen from a file. Two of three ask for another
    button than the tasks do."""
    day = date(2026, 1, 1) + timedelta(days=rng.randrange(1500))
    screen = next(screens(_seed(rng)))
    asked, cell = presses(rng, screen)
    call = {"name": "Read", "arguments": {"file_path": FILE}}
    return (
        [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": REMINDER.format(date=day) + f"Read {FILE}. {asked}"},
            {"role": "assistant", "content": "", "tool_calls": [{"function": call}]},
            {"role": "tool", "content": [{"type": "image"}]},
            {"role": "assistant", "content": place(cell)},
        ],
        READ,
        [screen],
    )


def without_tools(rng: random.Random, presses: Presses = by_colour) -> Conversation:
    """The same without its longest part."""
    messages, _, shown = claude_code(rng, presses)
    return messages, [], shown


def without_prompts(rng: random.Random, presses: Presses = by_colour) -> Conversation:
    """The task alone: a seventh of the length."""
    (_, asked, *rest), _, shown = claude_code(rng, presses)
    return [{**asked, "content": asked["content"].splitlines()[-1]}, *rest], [], shown


class Stage(NamedTuple):
    """A part of a warm-up."""

    conversation: Callable[..., Conversation]
    steps: int
    rate: float
    right: float = 0.0
    """The likelihood of the button that is asked for, in the mean of screens that the model has not
    seen, until which the steps are repeated. At most 0.83, because the green one is pressed in half
    of the cases."""


WARM_UPS = {
    "openai-sdk": [Stage(openai_sdk, 400, 3e-3)],
    "claude-code": [
        Stage(openai_sdk, 700, 3e-3),
        Stage(with_colours, 1000, 2.1e-3, right=0.76),
        Stage(without_prompts, 500, 1.5e-3, right=0.76),
        Stage(without_tools, 200, 1.2e-3, right=0.76),
        Stage(claude_code, 250, 0.9e-3, right=0.76),
    ],
}
"""Claude Code's conversation has 517 tokens. A model that begins with it learns to press buttons,
but no colours, and then RL has nothing to choose by. A stage ends by what the model has learned,
because equal steps make models on other processors that know more or less."""


def _seed(rng: random.Random) -> int:
    """Of no task."""
    return rng.randrange(1 << 40, 1 << 50)


class Lesson:
    """Batches of conversations, all of one length."""

    def __init__(
        self, processor: Any, conversation: Callable[..., Conversation], seed: int
    ) -> None:
        self._processor = processor
        self._conversation = conversation
        self._rng = random.Random(seed)
        self._header = self._tokens("<|im_start|>assistant\n")

    def batch(self, size: int, presses: Presses | None = None) -> tuple[dict[str, Tensor], Tensor]:
        """What the model gets, and which tokens it is to say, `[size, T]` bool. `presses`: None:
        as in the conversation of the warm-up."""
        rows, images = [], []
        given = {} if presses is None else {"presses": presses}
        for _ in range(size):
            messages, tools, shown = self._conversation(self._rng, **given)
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
