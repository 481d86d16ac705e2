"""Properties of each family of chat models, in addition to its renderer: one entry per family.

A family's name is the name of its renderer in the `renderers` package. A family without an entry
works, but its tool calls are sent only when they are complete. A family from outside this package
is a `Family` with `build`, which `rendering.renderer` names as `package.module:NAME`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from renderers.base import Renderer

from proxy.rendering.gemma_arguments import gemma_arguments
from proxy.rendering.tokenizer import Tokenizer

Build = Callable[[Tokenizer, dict[str, Any]], Renderer]
"""Creates a renderer from the tokenizer and `rendering.template_kwargs`. Raises ValueError for
another family's vocabulary."""


@dataclass(frozen=True, slots=True)
class Family:
    """Example: Family("mine", build=make_renderer, separators=("<think>", "</think>", …))"""

    name: str
    build: Build | None = None
    """None: the `renderers` package creates the renderer by the family's name."""
    separators: tuple[str, str, str, str] | None = None
    """Single tokens that open and close the reasoning and a tool call. If they are set, the answer
    can be parsed token by token: white space around text and reasoning is trimmed, and the first
    tool call ends the text."""
    call_form: re.Pattern[str] | None = None
    """For calls whose arguments are written as JSON: matches what precedes the arguments. If it has
    no group `name` or `quoted`, the renderer reads the tool's name."""
    call_closes: tuple[str, str] | None = None
    """For calls with one tag per argument: the text that ends a call after a whole argument, and
    the text that ends one inside an argument."""
    arguments_to_json: Callable[..., str] | None = None
    """For calls whose arguments are written in a notation of the family, after `call_form`: takes
    their text and `unfinished`, and returns JSON (see `gemma_arguments`)."""
    call_is_answer: bool = False
    """No marker begins a call. An answer is a call if it begins like a call of an offered tool."""
    call_ends_reasoning: bool = False
    """A call ends the reasoning without a marker."""
    named_before_call: bool = False
    """A tool's name is written before the marker that makes it a call."""
    reasoning_name: str = ""
    """The answer begins with the reasoning, and the reasoning with this name of its channel."""
    forgetting: tuple[str, ...] = ()
    """After text or calls the first of these tokens makes the renderer drop both, unless the second
    token follows."""
    encodes_text_plainly: bool = False
    """The renderer itself encodes the texts of messages without control tokens."""
    takes_stand_ins: bool = False
    """The renderer only concatenates the ids of texts, so that a single number can represent a long
    text while it renders."""


_BAR = "\N{FULLWIDTH VERTICAL LINE}"
_WRAPPED = re.compile(
    r'\s*\{\s*"name"\s*:\s*(?P<quoted>"(?:[^"\\]|\\.)+")\s*,'
    r'\s*"(?:arguments|parameters|args)"\s*:\s*(?=\{)'
)
_DEEPSEEK = re.compile(
    rf"[^\n]*?<{_BAR}tool\u2581sep{_BAR}>[^\S\n]*(?P<name>[^\n]+?)[^\S\n]*\n"
    r"\s*(?:```(?:json)?\s*)?(?=\{)"
)
_KIMI = re.compile(r"(?s).*?<\|tool_call_argument_begin\|>\s*(?=\{)")
_BARE = re.compile(r"\s*(?=\{)")
_QWEN_XML = ("</tool_call>", "\n</parameter>\n</function>\n</tool_call>")
_GLM_XML = ("</tool_call>", "</arg_value></tool_call>")
_GEMMA = re.compile(r"call:\s*(?P<name>[^{]*?)\s*(?=\{)")
_INVOKE = f"</{_BAR}DSML{_BAR}invoke>"


def _named(names: Iterable[str], family: Family) -> list[Family]:
    return [replace(family, name=name) for name in names]


_ALL = (
    Family("deepseek-r1", call_form=_DEEPSEEK),
    Family("deepseek-v3", call_form=_DEEPSEEK),
    Family(
        "deepseek-v4",
        call_closes=(_INVOKE, f"</{_BAR}DSML{_BAR}parameter>\n{_INVOKE}"),
        call_ends_reasoning=True,
    ),
    Family(
        "gemma4",
        call_form=_GEMMA,
        arguments_to_json=gemma_arguments,
        reasoning_name="thought",
        forgetting=("<|channel>", "<channel|>"),
    ),
    *_named(
        ("glm-4.5", "glm-5", "glm-5.1", "glm-5.3"),
        Family("", call_closes=_GLM_XML, call_ends_reasoning=True),
    ),
    Family("gpt-oss", call_form=_BARE, call_ends_reasoning=True, encodes_text_plainly=True),
    Family(
        "hy3",
        call_closes=(
            "</tool_call:opensource>",
            "</arg_value:opensource></tool_call:opensource>",
        ),
    ),
    Family("inkling", call_form=_WRAPPED, call_ends_reasoning=True, named_before_call=True),
    *_named(("kimi-k2", "kimi-k2.5"), Family("", call_form=_KIMI)),
    *_named(
        ("laguna-m.1", "laguna-s-2.1", "laguna-xs-2.1", "laguna-xs.2"),
        Family("", call_closes=_GLM_XML),
    ),
    Family("llama-3", call_form=_WRAPPED, call_is_answer=True, forgetting=("<|end_header_id|>",)),
    Family(
        "minimax-m2",
        call_closes=(
            "</invoke></minimax:tool_call>",
            "</parameter></invoke></minimax:tool_call>",
        ),
    ),
    *_named(
        ("nemotron-3", "nemotron-3-ultra", "nemotron-3.5", "prime-qwen3"),
        Family("", call_closes=_QWEN_XML),
    ),
    Family(
        "qwen3",
        separators=("<think>", "</think>", "<tool_call>", "</tool_call>"),
        call_form=_WRAPPED,
        takes_stand_ins=True,
    ),
    Family("qwen3-vl", call_form=_WRAPPED),
    Family("qwen3.5", call_closes=_QWEN_XML, takes_stand_ins=True),
    *_named(("qwen3.6", "qwen3.8"), Family("", call_closes=_QWEN_XML)),
    Family("template", call_form=_WRAPPED),
)
FAMILIES: Mapping[str, Family] = MappingProxyType({family.name: family for family in _ALL})


def family_of(name: str) -> Family:
    """The family with the given renderer name."""
    return FAMILIES.get(name) or Family(name)
