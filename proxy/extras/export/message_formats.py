"""Formats whose rows hold messages: conversations, and pairs of a better and a worse one.

The messages are those that the agent sent, in the form of Chat Completions whatever its dialect,
with the answers as they were recorded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

from proxy.conversation.messages import Message
from proxy.extras.export.conversations import (
    ConversationPath,
    chat_message,
    conversation_paths,
    message_columns,
)
from proxy.extras.export.images import (
    IMAGE_LIST,
    image_type,
    images_of,
    refuse_images,
    seen_as_images,
)
from proxy.extras.export.protocol import LeftOut, Row, Sample


class MessagesFormat:
    """One row per conversation. `sampled` marks the messages to train, each in one row only. If any
    session has images, each content is a list of parts, and `images` has a row's images in the
    order of the parts."""

    unit: Literal["session"] = "session"
    trains = needs_reward = False
    texts_only = True
    no_images: str | None = None
    shows_images = False

    def schema(self, pa: Any) -> Any:
        columns = {
            "trial_id": pa.string(),
            "task_id": pa.string(),
            "kind": pa.string(),
            "reward": pa.float64(),
            "metadata": pa.string(),
            "tools": pa.string(),
            "messages": message_columns(pa, as_parts=self.shows_images),
            "sampled": pa.list_(pa.bool_()),
        }
        return _with_images(pa, columns) if self.shows_images else pa.schema(columns)

    def rows(self, samples: Sequence[Sample]) -> Iterator[Row]:
        refuse_images(self, samples)
        (sample,) = samples
        as_parts = self.shows_images
        for path in conversation_paths(sample.turns):
            yield {
                "trial_id": sample.session.session_id,
                "task_id": sample.task_id,
                "kind": sample.session.kind.value,
                "reward": sample.reward,
                "metadata": dict(sample.session.metadata),
                "tools": list(path.tools) or None,
                "messages": [chat_message(each, as_parts=as_parts) for each in path.messages],
                "sampled": [at in path.sampled for at in range(len(path.messages))],
            } | ({"images": images_of(sample, path.messages)} if as_parts else {})


class DpoFormat:
    """TRL's conversational preference data: `prompt`, `chosen`, `rejected`.

    Of each session it takes the conversation with the most answers. The prompt is what both have in
    common, and it must end where the policy answered differently; other pairs have no row. With
    images as `MessagesFormat`; all must be in the prompt, as those of TRL are.
    """

    unit: Literal["pair"] = "pair"
    trains = needs_reward = True
    texts_only = True
    no_images: str | None = None
    shows_images = False

    def schema(self, pa: Any) -> Any:
        messages = message_columns(pa, as_parts=self.shows_images)
        columns = {
            "task_id": pa.string(),
            "chosen_id": pa.string(),
            "rejected_id": pa.string(),
            "chosen_reward": pa.float64(),
            "rejected_reward": pa.float64(),
            "tools": pa.string(),
            "prompt": messages,
            "chosen": messages,
            "rejected": messages,
        }
        return _with_images(pa, columns) if self.shows_images else pa.schema(columns)

    def rows(self, samples: Sequence[Sample]) -> Iterator[Row]:
        refuse_images(self, samples)
        better, worse = samples
        paths = [_main(sample) for sample in samples]
        if paths[0] is None or paths[1] is None or paths[0].tools != paths[1].tools:
            return
        start = _common(paths[0], paths[1])
        if start is None:
            return
        ends = paths[0].messages[start:], paths[1].messages[start:]
        if any(images_of(each, end) for each, end in zip(samples, ends, strict=True)):
            raise LeftOut("images after the prompt, which TRL's preference data have no place for")
        prompt = paths[0].messages[:start]
        yield {
            "task_id": better.task_id,
            "chosen_id": better.session.session_id,
            "rejected_id": worse.session.session_id,
            "chosen_reward": better.reward,
            "rejected_reward": worse.reward,
            "tools": list(paths[0].tools) or None,
            "prompt": self._chat(prompt),
            "chosen": self._chat(ends[0]),
            "rejected": self._chat(ends[1]),
        } | ({"images": images_of(better, prompt)} if self.shows_images else {})

    def _chat(self, messages: Sequence[Message]) -> list[Row]:
        return [chat_message(message, as_parts=self.shows_images) for message in messages]


def _main(sample: Sample) -> ConversationPath | None:
    paths = list(conversation_paths(sample.turns))
    return max(paths, key=lambda path: len(path.answers), default=None)


def _common(one: ConversationPath, other: ConversationPath) -> int | None:
    """Number of messages that both begin with; None if the next ones are not both answers."""
    pairs = zip(one.messages, other.messages, strict=False)
    for at, (first, second) in enumerate(pairs):
        if _content(first) != _content(second):
            return at if at in one.answers and at in other.answers else None
    return None


def _content(message: Message) -> Row:
    """The message without the ids of its calls, which are random."""
    calls = [(call.name, call.arguments) for call in message.tool_calls]
    return {"role": message.role, "said": (message.text, message.reasoning), "calls": calls}


def _with_images(pa: Any, columns: Row) -> Any:
    columns["images"] = pa.list_(image_type(pa))
    return seen_as_images(pa, columns, {"images": IMAGE_LIST})
