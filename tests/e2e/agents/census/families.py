"""The model families of the census: a checkpoint without weights each, and answers written with the
family's own chat template.

The templates are files of the package `trl`, the vocabularies of Qwen3 and of gpt-oss those of
`dashscope` and `openai-harmony`. Without a folder in which `dashscope` is installed, a small
vocabulary takes the place of Qwen3's: the templates, the control words and the parsers stay the
same.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers

from examples.recipes.vocabulary import CONTROL_WORDS, byte_pairs, qwen_tokenizer
from proxy.config import RenderingConfig
from proxy.conversation import Message
from proxy.conversation.messages import arguments_object
from proxy.rendering.chat_template import ChatTemplate
from proxy.rendering.rendering import Rendering
from proxy.rendering.tokenizer import load_tokenizer
from tests.proxy.checkpoint import write_checkpoint

_GLM = (
    "<|endoftext|>", "[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>", "<|system|>", "<|user|>",
    "<|assistant|>", "<|observation|>", "/nothink", "<think>", "</think>", "<tool_call>",
    "</tool_call>", "<tool_response>", "</tool_response>", "<arg_key>", "</arg_key>",
    "<arg_value>", "</arg_value>",
)  # fmt: skip
_HARMONY = {
    "<|startoftext|>": 199998, "<|endoftext|>": 199999, "<|return|>": 200002,
    "<|constrain|>": 200003, "<|channel|>": 200005, "<|start|>": 200006, "<|end|>": 200007,
    "<|message|>": 200008, "<|call|>": 200012,
}  # fmt: skip
_HARMONY_WORDS = tuple(
    {at: word for word, at in _HARMONY.items()}.get(at, f"<|reserved_{at}|>")
    for at in range(min(_HARMONY.values()), max(_HARMONY.values()) + 1)
)
_O200K = "|".join(
    (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
"""How gpt-oss's tokenizer splits text before it joins bytes."""
_QWEN_ENDS = ("<|im_end|>", "<|endoftext|>")
CONTEXT_TOKENS = 262_144


@dataclass(frozen=True, slots=True)
class Family:
    """Example: Family("qwen3.5", "qwen3_5_think.jinja", …), Qwen3.5 with reasoning"""

    name: str
    template: str
    words: Sequence[str]
    """Control words in the order of their ids."""
    text: Sequence[str]
    """Those of them that `skip_special_tokens` does not hide."""
    ends: Sequence[str]
    """What ends an answer."""
    after_calls: str
    """What ends an answer with calls, if the template does not write it."""
    after_text: str
    opened: str = ""
    """What the prompt has already of an answer as the template writes it."""
    tags: bool = False
    """Whether arguments are written as tags instead of JSON."""
    several_calls: bool = True
    """Whether one answer may have two calls."""
    images: bool = False
    """Whether the model reads images."""


FAMILIES = {
    family.name: family
    for family in (
        Family(
            "qwen3", "qwen3.jinja", CONTROL_WORDS, CONTROL_WORDS[14:], _QWEN_ENDS,
            "<|im_end|>", "<|im_end|>",
        ),
        Family(
            "qwen3.5", "qwen3_5_think.jinja", CONTROL_WORDS, CONTROL_WORDS[14:], _QWEN_ENDS,
            "<|im_end|>", "<|im_end|>", tags=True,
        ),
        Family(
            "qwen3-vl", "qwen3_vl.jinja", CONTROL_WORDS, CONTROL_WORDS[14:], _QWEN_ENDS,
            "<|im_end|>", "<|im_end|>", images=True,
        ),
        Family(
            "glm", "glm4moe.jinja", _GLM, _GLM[10:],
            ("<|endoftext|>", "<|user|>", "<|observation|>"), "<|observation|>", "<|user|>",
            tags=True,
        ),
        Family(
            "gpt-oss", "gptoss.jinja", _HARMONY_WORDS, (), ("<|return|>", "<|call|>"), "<|call|>",
            "<|return|>", opened="<|channel|>analysis<|message|>", several_calls=False,
        ),
    )
}  # fmt: skip


def write_family(family: Family, folder: Path, packages: Path | None) -> Path:
    """The checkpoint's folder. `packages`: where `dashscope` is installed."""
    if family.name == "gpt-oss":
        _save(_harmony_tokenizer(), family, folder)
    elif packages is None:
        write_checkpoint(folder)
        _save(Tokenizer.from_file(str(folder / "tokenizer.json")), family, folder)
    else:
        _save(qwen_tokenizer(packages / "dashscope/resources/qwen.tiktoken"), family, folder)
    found = importlib.util.find_spec("trl")
    assert found is not None, "trl is not installed: python -m benchmarks.install reference"
    templates = Path(found.submodule_search_locations[0]) / "chat_templates"  # type: ignore[index]
    (folder / "chat_template.jinja").write_text((templates / family.template).read_text())
    return folder


def _save(tokenizer: Tokenizer, family: Family, folder: Path) -> None:
    tokenizer.add_tokens(
        [AddedToken(w, normalized=False, special=w not in family.text) for w in family.words]
    )
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"eos_token": family.ends[0], "pad_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    model: dict[str, int | None] = {"max_position_embeddings": CONTEXT_TOKENS}
    if family.images:
        model["image_token_id"] = tokenizer.token_to_id("<|image_pad|>")
    (folder / "config.json").write_text(json.dumps(model))
    ends = [tokenizer.token_to_id(word) for word in family.ends]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))


def _harmony_tokenizer() -> Tokenizer:
    """gpt-oss's tokenizer, from the vocabulary of `openai-harmony`."""
    from openai_harmony import HarmonyEncodingName, load_harmony_encoding

    encoding = load_harmony_encoding(HarmonyEncodingName.HARMONY_GPT_OSS)
    words = min(_HARMONY.values())
    tokenizer = byte_pairs({encoding._inner.decode_bytes([id_]): id_ for id_ in range(words)})
    split = pre_tokenizers.Split(Regex(_O200K), "isolated")
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_only])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


class Writer:
    """Writes answers of a family as its model would sample them."""

    def __init__(self, family: Family, checkpoint: Path) -> None:
        self.family = family
        self.tokenizer = load_tokenizer(checkpoint)
        self.renderer = family.name if family.name == "gpt-oss" else "auto"
        """The setting `rendering.renderer` of its proxies."""
        self.rendering = Rendering(self.tokenizer, RenderingConfig(renderer=self.renderer))
        self._template = ChatTemplate(
            self.tokenizer.chat_template or "", self.tokenizer.special_tokens, {}
        )

    def ids(self, answer: Message, tools: list[dict[str, Any]]) -> list[int]:
        """The ids that follow the generation prompt, with the token that ends the answer."""
        return self.tokenizer.encode(self.text(answer, tools))

    def text(self, answer: Message, tools: list[dict[str, Any]]) -> str:
        # gpt-oss's own template refuses a function without a description, which APIs allow.
        tools = [tool | {"function": {"description": "", **tool["function"]}} for tool in tools]
        asked = [{"role": "user", "content": "Go."}]
        prompt = self._template.render(asked, tools, add_generation_prompt=True)
        message = self._message(answer)
        whole = self._template.render([*asked, message], tools, add_generation_prompt=False)
        if not whole.startswith(prompt):
            raise ValueError(f"{self.family.name}: {whole!r} does not begin with {prompt!r}")
        text = whole[len(prompt) :].removeprefix(self.family.opened)
        end = self.family.after_calls if answer.tool_calls else self.family.after_text
        return text[: text.index(end) + len(end)] if end in text else text + end

    def _message(self, answer: Message) -> dict[str, Any]:
        calls = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": arguments_object(call)},
            }
            for call in answer.tool_calls
        ]
        thought = "thinking" if self.family.name == "gpt-oss" else "reasoning_content"
        message: dict[str, Any] = {"role": "assistant", "content": answer.text}
        message |= {"tool_calls": calls} if calls else {}
        if thought == "thinking" and calls and answer.reasoning:
            message["content"] = ""  # its template writes only one of them before a call
        return message | ({thought: answer.reasoning} if answer.reasoning else {})
