"""Renders a checkpoint's own chat template (Jinja) like transformers."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from proxy.errors import ConfigurationError, RequestError


class ChatTemplate:
    """Example: ChatTemplate(source, {"eos_token": "<|im_end|>"}).render(messages, tools)"""

    def __init__(
        self, source: str, special_tokens: dict[str, str], template_kwargs: dict[str, Any]
    ) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise ConfigurationError(
                f"model: the chat template is not valid Jinja: {error}"
            ) from error
        self._variables = {**special_tokens, **template_kwargs}

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        *,
        add_generation_prompt: bool,
    ) -> str:
        """Raises RequestError if the template refuses the conversation."""
        try:
            return self._template.render(
                messages=messages,
                tools=tools or None,
                add_generation_prompt=add_generation_prompt,
                **self._variables,
            )
        except (TemplateError, SecurityError, TypeError, ValueError, KeyError) as error:
            raise RequestError(
                f"messages: the model's chat template refuses this conversation: {error}",
                param="messages",
            ) from error


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}` marks an assistant's text and is ignored here."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own declaration

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
