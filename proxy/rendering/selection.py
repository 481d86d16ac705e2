"""Selects the renderer for a checkpoint: the one that agrees with its chat template.

A model's name is not enough, because fine-tunes change the template and keep the name. With `auto`,
probe conversations are rendered with the checkpoint's own template and with each known renderer;
the first renderer that produces the same token ids for all probes is used, or the first such one
that knows images if the model reads them. If none does, the
template itself is used, and a turn continues a recorded one only where that can be proven.
"""

from __future__ import annotations

import re
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any

from pydantic import ValidationError
from renderers import config_from_name, create_renderer, merge_chat_template_kwargs
from renderers.base import MODEL_RENDERER_MAP, Renderer
from renderers.configs import DefaultRendererConfig

from proxy.config import RenderingConfig
from proxy.errors import ConfigurationError, RequestError
from proxy.rendering.chat_template import ChatTemplate, RunawayTemplate
from proxy.rendering.families import GLM_TAGS, GLM_TIGHT_TAGS, QWEN_TAGS, Family, family_of
from proxy.rendering.harmony_vocabulary import harmony_vocabulary
from proxy.rendering.tokenizer import Tokenizer
from proxy.settings.plugins import load_plugin

TEMPLATE = "template"
"""The checkpoint's own chat template, for families that `renderers` does not know."""

_UNBUILDABLE = (AssertionError, AttributeError, KeyError, OSError, RuntimeError, TypeError)
"""What a renderer raises, besides ValueError and ImportError, for another family's vocabulary."""


def choose_renderer(tokenizer: Tokenizer, config: RenderingConfig) -> tuple[Family, Renderer]:
    """Returns the family and its renderer. Raises ConfigurationError."""
    if config.renderer not in ("auto", TEMPLATE):
        family = _family(config.renderer)
        return family, _named(family, tokenizer, config.template_kwargs)
    if tokenizer.chat_template is None:
        raise ConfigurationError(
            f"model: {tokenizer.name_or_path} has no chat template; set rendering.renderer=NAME "
            f"(one of {', '.join(renderer_names())})"
        )
    template = ChatTemplate(
        tokenizer.chat_template, tokenizer.special_tokens, config.template_kwargs
    )
    tokenizer.template = template
    _check_that_it_ends(template, tokenizer.name_or_path)
    if config.renderer == "auto":
        wants_images = config.images and tokenizer.image_token_id is not None
        first: tuple[Family, Renderer] | None = None
        for name in renderer_names():
            renderer = _agreeing(name, tokenizer, template, config.template_kwargs)
            if renderer is None:
                continue
            first = first or (family_of(name), renderer)
            if not wants_images or hasattr(renderer, "_process_image"):
                return family_of(name), renderer
        if first is not None:
            return first
    renderer = _template_renderer(tokenizer)
    return _template_family(tokenizer, renderer), renderer


def renderer_names() -> list[str]:
    """The names of the renderers of the package `renderers`."""
    return list(dict.fromkeys(MODEL_RENDERER_MAP.values()))


def _family(name: str) -> Family:
    """A known family by its name, or any other by its import path. Raises ConfigurationError."""
    if ":" not in name:
        return family_of(name)
    family = load_plugin("rendering.renderer", name, {})
    if not isinstance(family, Family) or family.build is None:
        raise ConfigurationError(
            f"rendering.renderer: {name} is {family!r}; give a "
            "proxy.rendering.families.Family whose `build` is set"
        )
    return family


def _named(family: Family, tokenizer: Tokenizer, template_kwargs: dict[str, Any]) -> Renderer:
    build = family.build or partial(_build, family.name)
    try:
        return build(tokenizer, template_kwargs)
    except (*_UNBUILDABLE, ImportError, ValueError) as error:
        raise ConfigurationError(
            f"rendering.renderer: {family.name!r} cannot be used with {tokenizer.name_or_path}: "
            f"{error}"
        ) from error


def _build(name: str, tokenizer: Tokenizer, template_kwargs: dict[str, Any]) -> Renderer:
    config = config_from_name(name)
    if config is None:
        raise ValueError(f"no renderer is named {name!r}")
    retaining = type(config).model_validate({"name": name, "thinking_retention": "all"})
    merged = merge_chat_template_kwargs(retaining, template_kwargs)
    with harmony_vocabulary(tokenizer) if name == "gpt-oss" else nullcontext():
        return create_renderer(tokenizer, merged)


def _check_that_it_ends(template: ChatTemplate, model: str) -> None:
    """Raises ConfigurationError if the template does not end."""
    for messages, tools in _PROBES:
        try:
            template.render(messages, tools, add_generation_prompt=True)
        except RunawayTemplate as error:
            raise ConfigurationError(f"model: {model}: {error}") from error
        except RequestError:
            pass  # it refuses such a conversation


def _agreeing(
    name: str, tokenizer: Tokenizer, template: ChatTemplate, template_kwargs: dict[str, Any]
) -> Renderer | None:
    try:
        renderer = _build(name, tokenizer, template_kwargs)
        for messages, tools in _PROBES:
            text = template.render(messages, tools, add_generation_prompt=True)
            rendered = renderer.render_ids(messages, tools=tools, add_generation_prompt=True)
            if rendered != tokenizer.encode(text):
                return None
    except (*_UNBUILDABLE, ImportError, RequestError, ValueError, ValidationError):
        return None
    return renderer


def _template_renderer(tokenizer: Tokenizer) -> Renderer:
    source = tokenizer.chat_template or ""
    config = DefaultRendererConfig(
        tool_parser=next((name for mark, name in _TOOL_PARSERS if mark in source), None),
        reasoning_parser="think" if "<think>" in source else None,
    )
    return create_renderer(tokenizer, config)


def _template_family(tokenizer: Tokenizer, renderer: Renderer) -> Family:
    """The family of a checkpoint's own template, by the format of its calls."""
    family, source = family_of(TEMPLATE), tokenizer.chat_template or ""
    parser = next((name for mark, name in _TOOL_PARSERS if mark in source), None)
    if parser not in ("glm", "qwen3.5"):
        return family
    written = _written_calls(tokenizer, renderer, "")
    if parser == "glm":
        tags = GLM_TAGS if "</arg_key>\n<arg_value>" in written else GLM_TIGHT_TAGS
    else:
        tags = replace(QWEN_TAGS, python_words="\nTrue\n" in written)
    tags = replace(
        tags,
        between_calls=_between_calls(written),
        between_calls_after_text=_between_calls(_written_calls(tokenizer, renderer, "Let me see.")),
    )
    return replace(family, call_form=None, json_block=None, tags=tags)


def _between_calls(written: str) -> str | None:
    found = re.findall(r"</tool_call>(\s*)<tool_call>", written)
    return found[-1] if found else None


def _written_calls(tokenizer: Tokenizer, renderer: Renderer, text: str) -> str:
    """What the template writes for two calls with a boolean, or for one if it refuses two; empty if
    it refuses calls."""
    function = {"name": "look_up", "arguments": {"exact": True}}
    calls = [{"id": f"call_{n}", "type": "function", "function": function} for n in range(2)]
    for count in (2, 1):
        messages = [
            {"role": "user", "content": "Look."},
            {"role": "assistant", "content": text, "tool_calls": calls[:count]},
        ]
        with suppress(*_UNBUILDABLE, RequestError, ValueError):
            return tokenizer.decode(renderer.render_ids(messages, tools=[_TOOL]))
    return ""


_TOOL_PARSERS = (
    ("<function=", "qwen3.5"),
    ("<arg_key>", "glm"),
    ("<tool_call>", "qwen3"),
)
"""(mark in the template's source, name of the parser in `renderers.parsers`)"""

_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Looks a word up.",
        "parameters": {
            "type": "object",
            "properties": {"word": {"type": "string"}, "limit": {"type": "integer"}},
            "required": ["word"],
        },
    },
}
_CALLS: list[dict[str, Any]] = [
    {
        "id": f"call_{n}",
        "type": "function",
        "function": {"name": "look_up", "arguments": {"word": word, "limit": n}},
    }
    for n, word in enumerate(("été", "sum"))
]
_PROBES: tuple[tuple[list[dict[str, Any]], list[dict[str, Any]] | None], ...] = (
    ([{"role": "user", "content": "Hello there."}], None),
    (
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "What is 2 + 3?"},
            {"role": "assistant", "content": "5"},
            {"role": "user", "content": "And\n4 + 4?\n"},
        ],
        None,
    ),
    (
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Look two words up."},
            {"role": "assistant", "content": "", "tool_calls": _CALLS},
            {"role": "tool", "tool_call_id": "call_0", "content": "summer"},
            {"role": "tool", "tool_call_id": "call_1", "content": "total"},
        ],
        [_TOOL],
    ),
)
"""A single message, a history without tools, and a history with tool calls and results."""
