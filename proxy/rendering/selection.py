"""Which renderer speaks a checkpoint's language: the one that agrees with its chat template.

A name proves nothing (fine-tunes change templates under the same name), so `auto` renders probe
conversations with the checkpoint's own template and with every renderer whose special tokens its
vocabulary has, and takes the first that agrees token for token on all of them. None does: the
template itself is used, and turns are joined only where that can be proven.
"""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError
from renderers import config_from_name, create_renderer, merge_chat_template_kwargs
from renderers.base import MODEL_RENDERER_MAP, Renderer
from renderers.configs import DefaultRendererConfig

from proxy.config import RenderingConfig
from proxy.errors import ConfigurationError, RequestError
from proxy.rendering.chat_template import ChatTemplate
from proxy.rendering.tokenizer import Tokenizer

TEMPLATE = "template"
"""The checkpoint's own chat template, for families that `renderers` does not know."""

_UNBUILDABLE = (AssertionError, AttributeError, KeyError, OSError, RuntimeError, TypeError)
"""What a renderer raises (beside ValueError and ImportError) on a vocabulary not its own."""


def choose_renderer(tokenizer: Tokenizer, config: RenderingConfig) -> tuple[str, Renderer]:
    """The renderer's name and itself. Raises ConfigurationError."""
    if config.renderer not in ("auto", TEMPLATE):
        return config.renderer, _named(config.renderer, tokenizer, config.template_kwargs)
    if tokenizer.chat_template is None:
        raise ConfigurationError(
            f"model: {tokenizer.name_or_path} has no chat template; say rendering.renderer=NAME "
            f"(one of {', '.join(_names())})"
        )
    template = ChatTemplate(
        tokenizer.chat_template, tokenizer.special_tokens, config.template_kwargs
    )
    tokenizer.template = template
    if config.renderer == "auto":
        for name in _names():
            renderer = _agreeing(name, tokenizer, template, config.template_kwargs)
            if renderer is not None:
                return name, renderer
    return TEMPLATE, _template_renderer(tokenizer)


def _names() -> list[str]:
    return list(dict.fromkeys(MODEL_RENDERER_MAP.values()))


def _named(name: str, tokenizer: Tokenizer, template_kwargs: dict[str, Any]) -> Renderer:
    try:
        return _build(name, tokenizer, template_kwargs)
    except (*_UNBUILDABLE, ImportError, ValueError) as error:
        raise ConfigurationError(
            f"rendering.renderer={name!r} cannot be used with {tokenizer.name_or_path}: {error}"
        ) from error


def _build(name: str, tokenizer: Tokenizer, template_kwargs: dict[str, Any]) -> Renderer:
    config = config_from_name(name)
    if config is None:
        raise ValueError("say a renderer's name")
    retaining = type(config).model_validate({"name": name, "thinking_retention": "all"})
    merged = merge_chat_template_kwargs(retaining, template_kwargs)
    return create_renderer(tokenizer, merged)


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


_TOOL_PARSERS = (
    ("<function=", "qwen3.5"),
    ("<arg_key>", "glm"),
    ("<tool_call>", "qwen3"),
)
"""By a mark in the template's source: the names of `renderers.parsers`."""

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
"""Without tools, with a history, and with tool calls and results."""
