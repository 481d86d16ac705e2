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
from proxy.rendering.tagged_calls import CallTags
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
    tags: CallTags | None = None
    """For calls with one tag per argument."""
    json_block: tuple[str, str] | None = None
    """Single tokens around a call that is written as JSON, which may be part of its strings."""
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
_GEMMA = re.compile(r"call:\s*(?P<name>[^{]*?)\s*(?=\{)")
_HERMES = ("<tool_call>", "</tool_call>")
_FUNCTION = CallTags(
    call="<tool_call>",
    name=re.compile(r"\s*<function=(?P<name>[^>\n]{1,256})>"),
    opening="\n<function={}>",
    key=("<parameter=", ">"),
    value=("",),
    closes="</parameter>",
    ends=("</function>", "</tool_call>"),
    nests="<parameter=",
    on_lines=True,
)
QWEN_TAGS = replace(_FUNCTION, python_words=True)
"""Qwen3.5's, of which other families and templates differ in nothing but the words for booleans."""
GLM_TAGS = CallTags(
    call="<tool_call>",
    name=re.compile(r"\s*(?P<name>[^<\n]{0,255}[^<\s])"),
    opening="{}",
    key=("<arg_key>", "</arg_key>"),
    value=("<arg_value>",),
    closes="</arg_value>",
    ends=("</tool_call>",),
    nests="<arg_value>",
)
GLM_TIGHT_TAGS = replace(GLM_TAGS, between="")
_HUNYUAN = CallTags(
    call="<tool_call:opensource>",
    name=re.compile(r"\s*(?P<name>[^<\n]{0,255}[^<\s])\s*(?:<tool_sep:opensource>)?"),
    opening="{}<tool_sep:opensource>",
    key=("<arg_key:opensource>", "</arg_key:opensource>"),
    value=("<arg_value:opensource>",),
    closes="</arg_value:opensource>",
    ends=("</tool_call:opensource>",),
    nests="<arg_value:opensource>",
    around=("<tool_calls:opensource>", "</tool_calls:opensource>"),
)
_MINIMAX = CallTags(
    call="<invoke",
    name=re.compile(r'\s+name="(?P<name>[^"\n]{1,256})">'),
    opening=' name="{}">',
    key=('<parameter name="', '">'),
    value=("",),
    closes="</parameter>",
    ends=("</invoke>",),
    nests="<parameter name=",
    around=("<minimax:tool_call>", "</minimax:tool_call>"),
)
_DSML = f"{_BAR}DSML{_BAR}"
_DEEPSEEK_V4 = CallTags(
    call=f"<{_DSML}invoke",
    name=re.compile(r'\s+name="(?P<name>[^"\n]{1,256})">'),
    opening=' name="{}">',
    key=(f'<{_DSML}parameter name="', '" string="'),
    value=('true">', 'false">'),
    closes=f"</{_DSML}parameter>",
    ends=(f"</{_DSML}invoke>",),
    nests=f"<{_DSML}parameter name=",
    around=tuple(f"<{end}{_DSML}tool_calls>" for end in ("", "/")),
    no_arguments="\n",
    in_each_call=_DSML,
)


def _named(names: Iterable[str], family: Family) -> list[Family]:
    return [replace(family, name=name) for name in names]


_ALL = (
    Family("deepseek-r1", call_form=_DEEPSEEK),
    Family("deepseek-v3", call_form=_DEEPSEEK),
    Family("deepseek-v4", tags=_DEEPSEEK_V4, call_ends_reasoning=True),
    Family(
        "gemma4",
        call_form=_GEMMA,
        arguments_to_json=gemma_arguments,
        reasoning_name="thought",
        forgetting=("<|channel>", "<channel|>"),
    ),
    Family(
        "glm-4.5",
        tags=replace(GLM_TAGS, between_calls_after_text="", text_goes_on=True),
        call_ends_reasoning=True,
    ),
    *_named(
        ("glm-5", "glm-5.1", "glm-5.3"),
        Family("", tags=replace(GLM_TIGHT_TAGS, text_goes_on=True), call_ends_reasoning=True),
    ),
    Family("gpt-oss", call_form=_BARE, call_ends_reasoning=True, encodes_text_plainly=True),
    Family("hy3", tags=_HUNYUAN),
    Family("inkling", call_form=_WRAPPED, call_ends_reasoning=True, named_before_call=True),
    *_named(("kimi-k2", "kimi-k2.5"), Family("", call_form=_KIMI)),
    *_named(("laguna-m.1", "laguna-xs.2"), Family("", tags=GLM_TAGS)),
    *_named(("laguna-s-2.1", "laguna-xs-2.1"), Family("", tags=GLM_TIGHT_TAGS)),
    Family("llama-3", call_form=_WRAPPED, call_is_answer=True, forgetting=("<|end_header_id|>",)),
    Family("minimax-m2", tags=_MINIMAX),
    *_named(
        ("nemotron-3", "nemotron-3-ultra", "nemotron-3.5", "prime-qwen3"),
        Family("", tags=QWEN_TAGS),
    ),
    Family(
        "qwen3",
        separators=("<think>", "</think>", "<tool_call>", "</tool_call>"),
        call_form=_WRAPPED,
        json_block=_HERMES,
        takes_stand_ins=True,
    ),
    Family("qwen3-vl", call_form=_WRAPPED, json_block=_HERMES),
    Family("qwen3.5", tags=QWEN_TAGS, takes_stand_ins=True),
    *_named(("qwen3.6", "qwen3.8"), Family("", tags=_FUNCTION)),
    Family("template", call_form=_WRAPPED, json_block=_HERMES),
)
FAMILIES: Mapping[str, Family] = MappingProxyType({family.name: family for family in _ALL})


def family_of(name: str) -> Family:
    """The family with the given renderer name."""
    return FAMILIES.get(name) or Family(name)
