"""A checkpoint's tokenizer from `tokenizer.json`, without transformers.

Invariant: `encode` adds no special tokens and `decode` skips none, so that encoding and decoding
never change recorded ids.
"""

from __future__ import annotations

import sys
import threading
from array import array
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from struct import pack
from typing import Any, Self

import orjson
from tokenizers import Tokenizer as FastTokenizer

from proxy.errors import ConfigurationError
from proxy.records import Ids
from proxy.rendering.byte_pairs import BytePairs, faster
from proxy.rendering.chat_template import ChatTemplate
from proxy.rendering.control_text import MUTE, ControlText

BATCH_MIN_CHARS = 4096
"""From here on the batch form costs a fifth less: it alone does without offsets."""
REMEMBERED_BYTES = 8 * 2**20
STAND_IN_CHARS = 256
"""Longer texts are messages; of headers and markers, which are shorter, renderers read the ids."""
IMAGE = -(2**31)
"""What renderers emit for an image, instead of a token."""
ENTRY_BYTES = 256
"""What an entry costs besides its text and its ids."""


class RecentTexts:
    """Ids of the texts that were encoded last, in at most `limit_bytes` of memory. A text that
    would take more than a quarter of that is not kept.

    It saves encoding the same system prompt and tools for each session, the history of a fork, and
    the template's own text for each turn.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._bytes = 0
        self._ids: OrderedDict[str, array[int]] = OrderedDict()
        self._lock = threading.Lock()  # long conversations are rendered in threads

    def __len__(self) -> int:
        return self._bytes

    def get(self, text: str) -> array[int] | None:
        with self._lock:
            ids = self._ids.get(text)
            if ids is not None:
                self._ids.move_to_end(text)
        return ids

    def put(self, text: str, ids: list[int]) -> array[int]:
        kept = array("i", pack(f"{len(ids)}i", *ids))
        cost = _cost(text, kept)
        if cost > self._limit_bytes // 4:
            return kept
        with self._lock:
            self._bytes += cost if text not in self._ids else 0
            self._ids[text] = kept
            while self._bytes > self._limit_bytes:
                self._bytes -= _cost(*self._ids.popitem(last=False))
        return kept


def _cost(text: str, ids: array[int]) -> int:
    return sys.getsizeof(text) + sys.getsizeof(ids) + ENTRY_BYTES


class StandIns(threading.local):
    """Speeds up rendering, because renderers handle each token in Python. While `active` in a
    thread, a long text is encoded as one negative number, which `expand` replaces by its ids."""

    active = False

    def __init__(self) -> None:
        self._texts: list[array[int]] = []

    def __enter__(self) -> Self:
        self.active = True
        return self

    def __exit__(self, *_: object) -> None:
        self.active = False
        self._texts = []

    def add(self, ids: array[int]) -> int:
        self._texts.append(ids)
        return -len(self._texts)

    def expand(self, ids: list[int], images: Iterable[Ids] = ()) -> array[int]:
        """The ids with those of texts and of `images`, which are in the places of `IMAGE`."""
        out, rest = array("i"), iter(images)
        for token in ids:
            if token >= 0:
                out.append(token)
            elif token == IMAGE:
                out.frombytes(next(rest).tobytes())
            else:
                out.extend(self._texts[-token - 1])
        return out


@dataclass(slots=True)
class Tokenizer:
    """The interface that the `renderers` package needs, without the cost of offsets."""

    fast: FastTokenizer
    name_or_path: str
    eos_token_id: int | None
    unk_token_id: int | None
    stop_token_ids: tuple[int, ...]
    """Every id that ends generation according to the model's generation_config.json."""
    chat_template: str | None
    special_tokens: dict[str, str]
    """`bos_token`, `eos_token`, … for the chat template."""
    max_context_tokens: int | None
    """`max_position_embeddings` of the model's config.json."""
    vocab_size: int = 2**31
    """Every id that the model can sample is less than this: the number of rows of the embedding in
    config.json, including padding, and at least the tokenizer's own ids."""
    image_token_id: int | None = None
    """The id that stands for a part of an image, according to config.json; None: the model reads
    only text."""
    image_frame: tuple[str, str] | None = None
    """The word that the chat template writes for an image, and what the model's processor puts in
    its place, with one token of the image; None: the template writes that token itself."""
    template: ChatTemplate | None = None
    """The template of `apply_chat_template`; set if the template itself is used for rendering."""
    pairs: BytePairs | None = None
    """Encodes the same, and sooner; None for a tokenizer of which that cannot be shown."""
    control: ControlText | None = None
    """Encodes texts with marks; set by the rendering that marks them."""
    remembered: RecentTexts = field(default_factory=lambda: RecentTexts(REMEMBERED_BYTES))
    stand_ins: StandIns = field(default_factory=StandIns)

    def encode(self, text: str, add_special_tokens: bool = False, **_: Any) -> list[int]:
        if add_special_tokens:
            return self._encode(text, True)
        ids = self.remembered.get(text)
        if ids is None:
            ids = self.remembered.put(text, self._encode(text, False))
        if self.stand_ins.active and len(text) > STAND_IN_CHARS:
            return [self.stand_ins.add(ids)]
        return ids.tolist()

    def least_tokens(self, text: str) -> int:
        """A cheap lower bound on the text's number of tokens; 0 if none can be proven."""
        return 0 if self.pairs is None else self.pairs.least_tokens(text)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        if self.control is not None and MUTE in text:
            return self.control.encode(text)
        if self.pairs is not None and not add_special_tokens:
            paired = self.pairs.encode(text)
            if paired is not None:
                return paired
        if len(text) < BATCH_MIN_CHARS:
            ids: list[int] = self.fast.encode(text, add_special_tokens=add_special_tokens).ids
            return ids
        (found,) = self.fast.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids = found.ids
        return ids

    def decode(self, token_ids: Any, skip_special_tokens: bool = False, **_: Any) -> str:
        ids = [token_ids] if isinstance(token_ids, int) else token_ids
        paired = None if self.pairs is None else self.pairs.decode(ids)
        if paired is not None:
            return paired
        text: str = self.fast.decode(ids, skip_special_tokens=skip_special_tokens)
        return text

    def convert_tokens_to_ids(self, tokens: str | list[str]) -> Any:
        if isinstance(tokens, str):
            token_id = self.fast.token_to_id(tokens)
            return self.unk_token_id if token_id is None else token_id
        return [self.convert_tokens_to_ids(token) for token in tokens]

    def apply_chat_template(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        **_: Any,
    ) -> list[int]:
        if self.template is None:
            raise ConfigurationError(
                f"model: {self.name_or_path} has no chat template; add chat_template.jinja to the"
                " folder"
            )
        text = self.template.render(messages, tools, add_generation_prompt=add_generation_prompt)
        return self.encode(text if self.image_frame is None else text.replace(*self.image_frame))

    def get_vocab(self) -> dict[str, int]:
        vocab: dict[str, int] = self.fast.get_vocab(with_added_tokens=True)
        return vocab

    @property
    def all_special_tokens(self) -> list[str]:
        return list(dict.fromkeys(self.special_tokens.values()))

    def __len__(self) -> int:
        return int(self.fast.get_vocab_size(with_added_tokens=True))


def load_tokenizer(folder: Path) -> Tokenizer:
    """Raises ConfigurationError if `folder` is not a checkpoint with a fast tokenizer."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise ConfigurationError(
            f"model: {folder} has no tokenizer.json; give the folder of a Hugging Face checkpoint"
        )
    try:
        fast = FastTokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises plain Exception for every fault of the file
        raise ConfigurationError(f"model: cannot read {file}: {error}") from error
    config = _read_json(folder / "tokenizer_config.json")
    # Whether a text that contains a special token's name is text, or that token.
    fast.encode_special_tokens = bool(config.get("split_special_tokens", False))
    special = _special_tokens(config)
    eos_id = fast.token_to_id(special["eos_token"]) if "eos_token" in special else None
    unk_id = fast.token_to_id(special["unk_token"]) if "unk_token" in special else None
    model = _read_json(folder / "config.json")
    return Tokenizer(
        fast=fast,
        name_or_path=str(folder),
        eos_token_id=eos_id,
        unk_token_id=unk_id,
        stop_token_ids=_stop_ids(folder, eos_id),
        chat_template=_chat_template(folder, config),
        special_tokens=special,
        max_context_tokens=model.get("max_position_embeddings"),
        image_token_id=model.get("image_token_id", model.get("image_token_index")),
        image_frame=_image_frame(fast, model),
        vocab_size=_vocab_size(fast, model),
        pairs=faster(fast),
    )


def _image_frame(fast: FastTokenizer, model: dict[str, Any]) -> tuple[str, str] | None:
    """Gemma 3's: line breaks and words around an image, which become one token with line breaks
    of the text."""
    if model.get("model_type") != "gemma3":
        return None
    image = model.get("image_token_id", model.get("image_token_index"))
    ids = (model.get("boi_token_index"), image, model.get("eoi_token_index"))
    found = (fast.id_to_token(each) for each in ids if isinstance(each, int))
    words = [word for word in found if word]
    if len(words) < len(ids):
        return None
    start, word, end = words
    return start, f"\n\n{start}{word}{end}\n\n"


def _vocab_size(fast: FastTokenizer, model: dict[str, Any]) -> int:
    """Multimodal models have the text model's configuration in a section."""
    sections = [model, model.get("text_config"), model.get("llm_config")]
    found = [section.get("vocab_size") for section in sections if isinstance(section, dict)]
    declared = [size for size in found if isinstance(size, int)]
    if declared:
        return max(*declared, int(fast.get_vocab_size(with_added_tokens=True)))
    return 1 + max(fast.get_vocab(with_added_tokens=True).values())


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        data: dict[str, Any] = orjson.loads(file.read_bytes())
    except orjson.JSONDecodeError as error:
        raise ConfigurationError(f"model: {file} is not JSON: {error}") from error
    return data


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    names = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")
    tokens = {}
    for name in names:
        value = config.get(name)
        content = value.get("content") if isinstance(value, dict) else value
        if isinstance(content, str):
            tokens[name] = content
    return tokens


def _stop_ids(folder: Path, eos_id: int | None) -> tuple[int, ...]:
    declared = _read_json(folder / "generation_config.json").get("eos_token_id")
    ids = declared if isinstance(declared, list) else [declared]
    return tuple(dict.fromkeys(i for i in [eos_id, *ids] if isinstance(i, int)))


def _chat_template(folder: Path, config: dict[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):  # several named templates
        named = {entry["name"]: entry["template"] for entry in template}
        template = named.get("default")
    return template if isinstance(template, str) else None
