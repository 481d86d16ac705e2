"""Messages → token ids that are appended to the recorded ids; sampled ids → an assistant message.

Invariant: recorded ids are never replaced by rendered ones. `bridge` and `suffix_after` return only
the ids that follow the recorded path, and only if the renderer's output repeats the recorded part
id by id. Otherwise they return None, and the turn forks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
from jinja2 import TemplateError
from msgspec import structs
from renderers.base import ParsedResponse, ParsedToolCall, Renderer, ToolCallParseStatus

from proxy.config import RenderingConfig
from proxy.conversation.images import MARK, mark, named, parts, replaced
from proxy.conversation.json_values import is_deeper, parsed_arguments
from proxy.conversation.messages import Conversation, Message, ToolCall, own_call_id
from proxy.errors import RequestError
from proxy.records import Ids, ImageSpan
from proxy.records.images import image_ids
from proxy.rendering.answer_format import AnswerFormats
from proxy.rendering.calls import begins_call, joined_blocks, read_call
from proxy.rendering.control_text import MUTE, ControlText
from proxy.rendering.markers import find_markers
from proxy.rendering.openings import call_after, call_opening, text_opening
from proxy.rendering.selection import TEMPLATE, choose_renderer
from proxy.rendering.system_messages import system_first, wants_system_first
from proxy.rendering.tagged_calls import CallTags, tagged_calls
from proxy.rendering.tokenizer import IMAGE, StandIns, Tokenizer

CONTEXT_TOKENS = 1024
"""Number of tokens at the prompt's end that a bridge gets. It needs the opening of the last turn,
not the history, so joining a turn costs the same at 1k and at 128k tokens."""

NO_IMAGES: Mapping[str, ImageSpan] = MappingProxyType({})
MAX_OPENINGS = 256
"""Number of call openings that are cached; computing one takes several renderings."""
MAX_CALL_DEPTH = 900
"""Levels of objects and lists in a call; a deeper one is text. Python 3.11 can read about 990
levels, and Python 3.13 many more; they must not read an answer differently."""
_USUAL_OPENING = 16
"""Most answers begin less than this number of tokens after the end-of-turn token before them."""
_OUTSIDERS = ("user", "tool")
"""Whose texts may spell control tokens and must not be able to use them."""
_OPENING_TOKENS = 12
"""More than the opening of a call has up to the tool's name, if each character is a token."""
_DRAFTED_CALLS = 4
"""Openings of calls in an answer that are tried, because those in its reasoning are no calls."""
_OTHER_TEXTS = ("A", "B")
_TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks.",
        "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
    },
}
_REFUSED = (
    AssertionError,
    AttributeError,
    IndexError,
    KeyError,
    RecursionError,
    TemplateError,
    TypeError,
    ValueError,
)
"""What renderers raise for a conversation that their template cannot express."""


class Rendering:
    """Renders and parses for one checkpoint. All methods are pure and may run in a thread."""

    def __init__(self, tokenizer: Tokenizer, config: RenderingConfig) -> None:
        self.tokenizer = tokenizer
        self.family, self._renderer = choose_renderer(tokenizer, config)
        tokenizer.control = ControlText(tokenizer.fast, tokenizer.chat_template or "")
        self.muted_tokens = 0
        """Number of control tokens that texts of users and tools spelled, and that were encoded as
        text, since the start: whoever sees it change looks for them (`spelled_tokens`)."""
        own = self._renderer.get_stop_token_ids()
        self.stop_token_ids = tuple(dict.fromkeys([*own, *tokenizer.stop_token_ids]))
        self.closes = frozenset(self.stop_token_ids)
        self.markers = find_markers(self.family, tokenizer)
        self._marks = self.closes | (self.markers.all if self.markers else frozenset())
        self._stand_ins = tokenizer.stand_ins if self.family.takes_stand_ins else StandIns()
        self._forgetting: list[int] = tokenizer.convert_tokens_to_ids(list(self.family.forgetting))
        self._openings: dict[str | None, Ids] = {}
        self._image_pad: int | None = None
        """The id that the checkpoint's own template writes once for each image."""
        self._muted_images: list[tuple[str, str]] = []
        """The words that stand for images in what the template writes, each with the same as
        text."""
        self._formats = AnswerFormats(self)
        self._system_first = False
        self._system_first = wants_system_first(self._render)
        token = tokenizer.image_token_id if config.images else None
        self.image_token = token if token is not None and self._renders_images(token) else None
        """The id that the engine gets for each token of an image; None: images are not rendered."""
        self.shows_tools = self._shows_tools()
        """Whether the template writes the tools of a request into the prompt."""

    @property
    def name(self) -> str:
        """The name of the renderer's family."""
        return self.family.name

    def full(self, conversation: Conversation) -> Ids:
        """The whole prompt, up to the beginning of the answer. Raises RequestError."""
        with self._stand_ins as stand_ins:
            messages, images = conversation.messages, conversation.images
            ids = self._render(messages, conversation.tools, generate=True, images=images)
            return np.array(stand_ins.expand(ids, self._image_ids(ids, messages, images)), np.int32)

    def bridge(
        self,
        prompt_end: Ids,
        sampled: Ids,
        new: Sequence[Message],
        tools: list[dict[str, Any]],
        calls: Sequence[ToolCall],
        images: Mapping[str, ImageSpan] = NO_IMAGES,
    ) -> Ids | None:
        """The ids that `new` messages add after `…prompt_end + sampled`, or None.

        `calls` are the tool calls of the answer, for templates that write the tool's name into a
        tool result. If the answer was truncated, the result begins with the end-of-turn token that
        was not sampled. `images` as in `Conversation`. Raises RequestError for one that is unknown.
        """
        head = self._answer_opening(prompt_end)
        tail = sampled.tolist()
        known = head + tail
        with self._stand_ins as stand_ins:
            try:
                if self._system_first:
                    new = system_first(new, from_the_start=False)
                entries = self._to_template(new, calls, images)
                bridged = self._renderer.bridge_to_next_turn(
                    head, tail, entries, tools=tools or None
                )
            except _REFUSED:
                return None
            if bridged is None or bridged.token_ids[: len(known)] != known:
                return None
            added = bridged.token_ids[len(known) :]
            return np.array(stand_ins.expand(added, self._image_ids(added, new, images)), np.int32)

    def suffix_after(self, conversation: Conversation, answered: int, last_id: int) -> Ids | None:
        """The ids that follow a recorded path ending with message `answered`, or None.

        For chat templates without a renderer, and for histories in which the answer is followed by
        messages that were not sampled. `last_id` is the path's last id: the end-of-turn token if it
        was sampled.

        The template is probed: the history is rendered with two different texts in place of the
        next message. The next message begins where the two renderings differ, and the answer ends
        at the last end-of-turn token before that. The whole conversation must render the same up
        to there, and must begin with the rendering of the messages before the answer. The ids
        after the answer's end are then the ids that were added.
        """
        messages, tools, images = conversation.messages, conversation.tools, conversation.images
        if answered + 1 >= len(messages):
            return None
        known, following = messages[: answered + 1], messages[answered + 1]
        try:
            render = partial(self._render, tools=tools, images=images)
            whole = render(messages, generate=True)
            asked = render(known[:-1], generate=False) if answered else []
            one, other = (
                render([*known, structs.replace(following, text=text)], generate=False)
                for text in _OTHER_TEXTS
            )
        except RequestError:
            return None
        begins = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), 0)
        close = next((i for i in reversed(range(begins)) if one[i] in self.closes), None)
        if close is None or whole[: close + 1] != one[: close + 1]:
            return None
        if whole[: len(asked)] != asked:
            return None
        start = close + 1 if last_id in self.closes else close
        added = whole[start:]
        ids = self._image_ids(added, messages[answered + 1 :], images)
        return np.array(self._stand_ins.expand(added, ids), np.int32)

    def opening(self, forced: str | None) -> Ids:
        """The ids that begin a call of the tool `forced`, or of any tool if it is None.

        Raises RequestError.
        """
        ids = self._openings.get(forced)
        if ids is None:
            ids = np.array(call_opening(self, forced), np.int32)
            if len(self._openings) < MAX_OPENINGS:
                self._openings[forced] = ids
        return ids

    def call_after(
        self, spoken: list[int], prompt_end: Ids, forced: str | None
    ) -> tuple[int, list[int]]:
        """How an answer that ended without a call continues with one: the number of its ids that
        stay, and the ids that begin the call. `spoken` has no end-of-turn token."""
        return call_after(self, spoken, prompt_end, forced)

    def bound_format(
        self, structured: dict[str, Any], prompt_end: Ids, tools: list[dict[str, Any]]
    ) -> dict[str, Any]:
        """The `structured_outputs` for an answer whose message is bound to the format `structured`,
        and which may reason and call `tools` first. Raises RequestError."""
        return self._formats.bound(structured, self._answer_opening(prompt_end), tools)

    def prefill(self, text: str) -> Ids:
        """The ids that begin an answer with `text`. Raises RequestError."""
        return np.array(text_opening(self, text), np.int32)

    def parse(
        self,
        sampled: list[int],
        prompt_end: Ids,
        tools: list[dict[str, Any]],
        *,
        calls: bool,
        one_call: bool = False,
    ) -> Message:
        """The assistant message in `sampled`. Without `calls`, tool calls remain text.

        A malformed tool call remains text as the model wrote it. With `one_call`, everything after
        the first call is ignored.
        """
        plain = self._plain(sampled, prompt_end)
        if plain is not None:
            return Message("assistant", plain)
        parsed = self.parsed(sampled, prompt_end, tools)
        texts = [parsed.content.strip()] if parsed.content else []
        made: list[ToolCall] = []
        for item in self._items(parsed, sampled, tools, calls=calls):
            if isinstance(item, str):
                texts.append(item)
                continue
            made.append(item)
            if one_call:
                break
        for index, call in enumerate(made):
            call.id = own_call_id(call.id, made[:index])
        reasoning = (parsed.reasoning_content or "").strip()
        return Message("assistant", "\n".join(texts), reasoning or None, made)

    def parsed(
        self, sampled: list[int], prompt_end: Ids, tools: list[dict[str, Any]]
    ) -> ParsedResponse:
        """The renderer's parse of a finished or unfinished answer.

        The answer is cut before a token that would make the renderer drop the text before it (see
        `Family.forgetting`).
        """
        read = self._read_whole(sampled, prompt_end, tools)
        if self.family.tags is not None and self.family.tags.text_goes_on and read.tool_calls:
            start, _ = read.tool_calls[0].token_span or (0, 0)
            before = self._read_whole(sampled[:start], prompt_end, tools)
            read = replace(read, content=before.content)
        late = self._forgets_at(sampled, read) if self._forgetting else None
        if late is not None:
            read = self._read_whole(sampled[:late], prompt_end, tools)
        if not self.family.call_is_answer or read.tool_calls or not tools:
            return read
        return _as_call(read) if begins_call(self.family, read.content, tools) else read

    def _forgets_at(self, sampled: list[int], read: ParsedResponse) -> int | None:
        """Where the answer has to be cut for its renderer: see `Family.forgetting`."""
        opens, *closes = self._forgetting
        if closes and read.reasoning_complete is not False:
            return None
        closed = [at for at, token in enumerate(sampled) if token in closes]
        start = max([1, *(at + 1 for at in closed)])
        return next((at for at in range(start, len(sampled)) if sampled[at] == opens), None)

    def _read_whole(
        self, sampled: list[int], prompt_end: Ids, tools: list[dict[str, Any]]
    ) -> ParsedResponse:
        """The renderer's parse. Where it need not read the calls, it does not."""
        in_call = self.family.tags.in_each_call if self.family.tags else ""
        if in_call:
            for end in self._begun_calls(sampled, in_call):
                begun = self._read_up_to_here(sampled[:end], prompt_end, tools)
                if begun.tool_calls:
                    return begun
        return self._read_up_to_here(sampled, prompt_end, tools)

    def _begun_calls(self, sampled: list[int], in_call: str) -> Iterator[int]:
        """After which token the opening of a call is complete, for the first few calls."""
        token, found = self.tokenizer.fast.token_to_id(in_call), 0
        for at in (at for at, each in enumerate(sampled) if each == token):
            text = self.tokenizer.decode(sampled[at : at + _OPENING_TOKENS])
            if text.startswith(f"{in_call}invoke"):
                yield at + _OPENING_TOKENS
                found += 1
            if found == _DRAFTED_CALLS:
                return

    def _read_up_to_here(
        self, sampled: list[int], prompt_end: Ids, tools: list[dict[str, Any]]
    ) -> ParsedResponse:
        try:
            read = self._renderer.parse_response(
                sampled, tools=tools or None, prompt_ids=self._answer_opening(prompt_end)
            )
            if not any(_is_too_deep(attempt) for attempt in read.tool_calls):
                return read
        except _REFUSED:
            pass
        return ParsedResponse(content=self.tokenizer.decode(self.before_stop(sampled)))

    def calls_so_far(
        self, parsed: ParsedResponse, sampled: list[int], tools: list[dict[str, Any]]
    ) -> tuple[list[ToolCall], bool]:
        """The tool calls of an unfinished answer, as far as no later token can change them, and
        whether a call after the first has begun.

        It stops at the first attempt that is malformed, or whose arguments have not begun (gpt-oss
        would be read as calling without arguments). An incomplete character is held back.
        """
        tags = self.family.tags
        if tags is not None:
            read = self._tagged_calls(tags, parsed, sampled, tools, unfinished=True)
            calls = [item for item in read if isinstance(item, ToolCall)]
            return calls, len(calls) > 1
        calls, attempts = [], self._attempts(parsed, sampled, unfinished=True)
        for attempt in attempts:
            written = replace(attempt, raw=attempt.raw.rstrip("\N{REPLACEMENT CHARACTER}"))
            if not written.raw.strip():
                break
            call = read_call(self.family, written, tools, unfinished=True)
            if call is None:
                break
            calls.append(call)
        return calls, bool(calls) and len(attempts) > 1

    def least_tokens(self, conversation: Conversation, since: int = 0) -> int:
        """A lower bound on the number of tokens that the messages from index `since` on add.

        Counts only text that every renderer writes: user and tool messages without surrounding
        white space. Returns 0 for a checkpoint's own template, which may shorten any text.
        """
        if isinstance(conversation.raw, str):
            return self.tokenizer.least_tokens(conversation.raw)
        if conversation.raw is not None:
            return len(conversation.raw)
        if self.name == TEMPLATE:
            return 0
        return sum(
            self.tokenizer.least_tokens(replaced(message.text, _no_text).strip())
            for message in conversation.messages[since:]
            if message.role in ("user", "tool")
        )

    def spelled_tokens(self, messages: Sequence[Message]) -> int:
        """The number of control tokens that the texts of users and tools spell."""
        control = self.tokenizer.control
        if control is None or self.family.encodes_text_plainly:
            return 0
        return sum(control.muted(m.text)[1] for m in messages if m.role in _OUTSIDERS)

    def _to_template(
        self,
        messages: Sequence[Message],
        open_calls: Sequence[ToolCall] = (),
        images: Mapping[str, ImageSpan] = NO_IMAGES,
    ) -> list[dict[str, Any]]:
        """Messages in the form that chat templates take, with control tokens muted. Raises
        RequestError: an image is not among `images`."""
        entries = _to_template(messages, open_calls)
        control = self.tokenizer.control
        if control is not None and not self.family.encodes_text_plainly:
            for entry in entries:
                if entry["role"] in _OUTSIDERS:
                    entry["content"], spelled = control.muted(entry["content"])
                    self.muted_tokens += spelled
        for entry in entries:
            if MARK in entry["content"] and entry["role"] in _OUTSIDERS:
                entry["content"] = _with_images(entry["content"], images)
        if self._mutes_images(images):
            entries = [self._without_pads(entry) for entry in entries]
        return entries

    def _mutes_images(self, images: Mapping[str, ImageSpan]) -> bool:
        """Whether words for images in texts are told apart from those of the template."""
        framed = self.tokenizer.image_frame is not None
        return self._image_pad is not None and (bool(images) or framed)

    def _without_pads(self, value: Any) -> Any:
        """Texts, in any JSON, in which the words of an image's place are text."""
        if isinstance(value, str):
            for word, muted in self._muted_images:
                value = value.replace(word, muted)
            return value
        if isinstance(value, list):
            return [self._without_pads(each) for each in value]
        if isinstance(value, dict):
            return {self._without_pads(k): self._without_pads(v) for k, v in value.items()}
        return value

    def _image_ids(
        self, ids: Sequence[int], messages: Sequence[Message], images: Mapping[str, ImageSpan]
    ) -> list[Ids]:
        """The ids of the images in `ids`, which `messages` were rendered to. Raises
        RequestError."""
        if not images:
            return []
        found = [images[sha256] for sha256 in named(messages)]
        places = ids.count(IMAGE)
        if places != len(found):
            raise RequestError(
                f"messages: the model's chat template has places for {places} of the {len(found)} "
                "images",
                param="messages",
            )
        return [image_ids(image.digest, image.tokens) for image in found]

    def _renders_images(self, token: int) -> bool:
        """Whether each image of a user and of a tool gets one place in the ids. Makes the renderer
        emit `IMAGE` there, which no text can spell."""
        if not _emit_places(self._renderer):
            words = [self.tokenizer.fast.id_to_token(token) or ""]
            if self.tokenizer.image_frame is not None:
                words.append(self.tokenizer.image_frame[0])
            self._image_pad = token
            self._muted_images = [(word, word[:1] + MUTE + word[1:]) for word in words]
        probe = ImageSpan(0, 1, token, "00" * 32, "00" * 32)
        shown, call = mark(probe.sha256), ToolCall("call_0", "look", "{}")
        asked = Message("user", f"What is this? {shown}")
        made = Message("assistant", tool_calls=[call])
        result = Message("tool", f"{shown} and {shown}", tool_call_id="call_0")
        for messages, count in (([asked], 1), ([asked, made, result], 3)):
            try:
                ids = self._render(messages, [], generate=True, images={probe.sha256: probe})
            except RequestError:
                if messages[-1].role == "tool" and self._refuses(messages, shown):
                    continue  # also without images: it knows no tools
                return False
            if ids.count(IMAGE) != count or token in ids:
                return False
        return True

    def _shows_tools(self) -> bool:
        """True also for a template that refuses tools: then nothing is left out unseen."""
        asked = [Message("user", "What do you see?")]
        try:
            return self._render(asked, [_TOOL], generate=True) != self._render(
                asked, [], generate=True
            )
        except RequestError:
            return True

    def _refuses(self, messages: Sequence[Message], shown: str) -> bool:
        """Whether the template refuses the messages with another text in place of `shown`."""
        texts = [structs.replace(each, text=each.text.replace(shown, "it")) for each in messages]
        try:
            self._render(texts, [], generate=True)
        except RequestError:
            return True
        return False

    def before_stop(self, sampled: list[int]) -> list[int]:
        end = next((i for i, token in enumerate(sampled) if token in self.closes), len(sampled))
        return sampled[:end]

    def count(self, text: str) -> int:
        """Number of tokens in a text."""
        return len(self.tokenizer.encode(text))

    def _plain(self, sampled: list[int], prompt_end: Ids) -> str | None:
        """The text of an answer without reasoning or tool calls; None if the renderer must parse
        it."""
        if self.markers is None or not sampled:
            return None
        spoken = sampled[:-1] if sampled[-1] in self.closes else sampled
        if not self._marks.isdisjoint(spoken):
            return None
        if self.markers.think in self._answer_opening(prompt_end):
            return None
        return self.tokenizer.decode(spoken).strip()

    def _answer_opening(self, prompt_end: Ids) -> list[int]:
        """The ids from the end-of-turn token before the answer to the end of the prompt."""
        end: list[int] = []
        for size in (_USUAL_OPENING, CONTEXT_TOKENS):
            end = prompt_end[-size:].tolist()
            for at in range(len(end) - 1, -1, -1):
                if end[at] in self.closes:
                    return end[at:]
        return end

    def _render(
        self,
        messages: Sequence[Message],
        tools: list[dict[str, Any]],
        *,
        generate: bool,
        images: Mapping[str, ImageSpan] = NO_IMAGES,
    ) -> list[int]:
        if self._system_first:
            messages = system_first(messages, from_the_start=True)
        entries = self._to_template(messages, images=images)
        if self._mutes_images(images):
            tools = self._without_pads(tools)
        try:
            ids: list[int] = self._renderer.render_ids(
                entries, tools=tools or None, add_generation_prompt=generate
            )
        except _REFUSED as error:
            raise RequestError(
                f"messages: this conversation cannot be rendered for the model: {error}",
                param="messages",
            ) from error
        if images and self._image_pad is not None:
            ids = [IMAGE if token == self._image_pad else token for token in ids]
        return ids

    def _items(
        self,
        parsed: ParsedResponse,
        sampled: list[int],
        tools: list[dict[str, Any]],
        *,
        calls: bool,
    ) -> list[ToolCall | str]:
        """The calls of a finished answer, and other text from the first call on: malformed calls,
        and what the model says after a call. Without `calls`, everything is text."""
        if not parsed.tool_calls:
            return []
        if self.family.tags is not None:
            if not calls:
                return [self.tokenizer.decode(self._from_first_call(parsed, sampled)[1])]
            return self._tagged_calls(self.family.tags, parsed, sampled, tools, unfinished=False)
        items: list[ToolCall | str] = []
        for attempt in self._attempts(parsed, sampled, unfinished=False):
            call = read_call(self.family, attempt, tools) if calls else None
            items.append(self._raw(attempt, sampled) if call is None else call)
        return items

    def _attempts(
        self, parsed: ParsedResponse, sampled: list[int], *, unfinished: bool
    ) -> list[ParsedToolCall]:
        """The attempted calls, whose ends the renderer has not found if they are in strings."""
        block, spoken = self.family.json_block, self.before_stop(sampled)
        closes = None if block is None else self.tokenizer.fast.token_to_id(block[1])
        if closes is None:
            return list(parsed.tool_calls)
        decode = self.tokenizer.decode
        return joined_blocks(
            parsed.tool_calls, self.family, closes, spoken, decode, unfinished=unfinished
        )

    def _tagged_calls(
        self,
        tags: CallTags,
        parsed: ParsedResponse,
        sampled: list[int],
        tools: list[dict[str, Any]],
        *,
        unfinished: bool,
    ) -> list[ToolCall | str]:
        before, since = self._from_first_call(parsed, sampled)
        said = self.tokenizer.decode(before[-_USUAL_OPENING:]).rstrip()
        return tagged_calls(
            tags,
            self.tokenizer.decode(since),
            tools,
            unfinished=unfinished,
            after_text=bool(said) and not said.endswith("</think>"),
        )

    def _from_first_call(
        self, parsed: ParsedResponse, sampled: list[int]
    ) -> tuple[list[int], list[int]]:
        """The answer's tokens before its first call, and from it on."""
        spans = [attempt.token_span for attempt in parsed.tool_calls]
        start = min(span[0] for span in spans if span is not None)
        spoken = self.before_stop(sampled)
        return spoken[:start], spoken[start:]

    def _raw(self, attempt: ParsedToolCall, sampled: list[int]) -> str:
        if attempt.token_span is None:
            return str(attempt.raw)
        start, end = attempt.token_span
        text: str = self.tokenizer.decode(self.before_stop(sampled)[start:end])
        return text


def _with_images(text: str, images: Mapping[str, ImageSpan]) -> list[dict[str, Any]]:
    """The text as the parts that chat templates take. Raises RequestError."""
    content: list[dict[str, Any]] = []
    for before, sha256 in parts(text):
        if before:
            content.append({"type": "text", "text": before})
        if sha256 and sha256 not in images:
            raise RequestError(
                f"messages: the image {sha256} is not in this session's record; send it again",
                param="messages",
            )
        if sha256:
            content.append({"type": "image"})
    return content


def _emit_places(renderer: Renderer) -> bool:
    """Makes a renderer of images emit `IMAGE` once for each; False if it does not know images."""
    names = ("_image_pad", "_process_image")
    if not all(hasattr(renderer, name) for name in names):
        return False
    if getattr(getattr(renderer, "config", None), "add_vision_id", False):
        return False  # it numbers images, which it cannot in a turn that is appended
    grid = {"pixel_values": None, "image_grid_thw": None}
    own = {"_image_pad": IMAGE, "_process_image": lambda part: (None, grid, 1, "")}
    vars(renderer).update(own)
    return True


def _no_text(sha256: str) -> str:
    return ""


def _as_call(read: ParsedResponse) -> ParsedResponse:
    """An answer that is entirely a call, which may be unfinished."""
    attempt = ParsedToolCall(raw=read.content, status=ToolCallParseStatus.UNCLOSED_BLOCK)
    return replace(read, content="", tool_calls=[attempt])


def _is_too_deep(attempt: ParsedToolCall) -> bool:
    raw = str(attempt.raw)
    return raw.count("[") + raw.count("{") > MAX_CALL_DEPTH and is_deeper(
        attempt.arguments, MAX_CALL_DEPTH
    )


def _to_template(
    messages: Sequence[Message], open_calls: Sequence[ToolCall] = ()
) -> list[dict[str, Any]]:
    """Messages in the form that chat templates take."""
    names = {call.id: call.name for call in open_calls}
    out: list[dict[str, Any]] = []
    for message in messages:
        entry: dict[str, Any] = {"role": message.role, "content": message.text}
        if message.reasoning:
            entry["reasoning_content"] = message.reasoning
        if message.tool_calls:
            entry["tool_calls"] = [_template_call(call) for call in message.tool_calls]
            names.update((call.id, call.name) for call in message.tool_calls)
        if message.role == "tool":
            entry["tool_call_id"] = message.tool_call_id or ""
            entry["name"] = names.get(message.tool_call_id or "", "")
        out.append(entry)
    return out


def _template_call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": parsed_arguments(call.arguments)}
    return {"id": call.id, "type": "function", "function": function}
