"""Renders a checkpoint's own chat template (Jinja) like transformers.

Invariant: a rendering ends. A template that repeats its loops and macros too often, or whose text
grows too large, is refused: `MAX_STEPS` and `MAX_CHARS` are far above what any conversation needs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import datetime
from functools import wraps
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from proxy.errors import ConfigurationError, RequestError

MAX_STEPS = 1_000_000
"""Repetitions of loops and calls of macros in one rendering, besides `STEPS_PER_MESSAGE`; they take
about a second."""
STEPS_PER_MESSAGE = 10_000
"""Templates exist that go through all messages once for each message."""
MAX_CHARS = 1 << 26
"""Length of a text or list that a template makes: more than any context holds."""

_WIDENS = frozenset({"ljust", "rjust", "center", "zfill", "expandtabs", "indent", "batch", "slice"})
"""Methods and filters that make as much as a number says."""
_NUMBERS = re.compile(r"\d+")


@dataclass(slots=True)
class _Allowed:
    steps: int


_allowed: ContextVar[_Allowed] = ContextVar("allowed")
"""What the rendering of this thread or task may still do."""


class RunawayTemplate(RequestError):
    """A rendering that would not end, or not fit into memory."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"messages: the model's chat template {what}; give the checkpoint another "
            "chat_template.jinja",
            param="messages",
        )


class ChatTemplate:
    """Example: ChatTemplate(source, {"eos_token": "<|im_end|>"}).render(messages, tools)"""

    def __init__(
        self, source: str, special_tokens: dict[str, str], template_kwargs: dict[str, Any]
    ) -> None:
        environment = _Bounded(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        for name, honest in environment.filters.items():
            environment.filters[name] = _bounded_filter(name, honest)
        del environment.globals["lipsum"]  # writes as much as it is asked for
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except (TemplateError, RecursionError) as error:
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
        """Raises RequestError if the template refuses the conversation, RunawayTemplate if it
        does not end."""
        _allowed.set(_Allowed(MAX_STEPS + STEPS_PER_MESSAGE * len(messages)))
        try:
            return self._template.render(
                messages=messages,
                tools=tools or None,
                add_generation_prompt=add_generation_prompt,
                **self._variables,
            )
        except (RecursionError, MemoryError) as error:
            raise RunawayTemplate(f"ends with {type(error).__name__}") from error
        except (TemplateError, SecurityError, TypeError, ValueError, KeyError) as error:
            raise RequestError(
                f"messages: the model's chat template refuses this conversation: {error}",
                param="messages",
            ) from error


class _Bounded(ImmutableSandboxedEnvironment):
    """Counts what a template repeats, and measures what it makes."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(nodes.For):
            loop.iter = _calls("counted", loop.iter)  # type: ignore[arg-type]
        for repeated in tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock)):
            if getattr(repeated, "recursive", True):
                repeated.body.insert(0, nodes.ExprStmt(_calls("step")))  # type: ignore[attr-defined]
        _replace_concatenations(tree)
        tree.set_environment(self)
        return tree

    def counted(self, values: Iterable[Any]) -> Iterator[Any]:
        """The values of a loop; counts those that are read."""
        allowed = _allowed.get()
        for value in values:
            allowed.steps -= 1
            if allowed.steps < 0:
                _end()
            yield value

    def step(self) -> None:
        """A call of a macro, or of a loop that calls itself."""
        allowed = _allowed.get()
        allowed.steps -= 1
        if allowed.steps < 0:
            _end()

    def joined(self, *parts: Any) -> str:
        """`a ~ b`"""
        text = "".join(map(str, parts))
        _check_length(len(text))
        return text

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "*" and not (
            isinstance(left, int | float) and isinstance(right, int | float)
        ):
            _check_length(_factor(left) * _factor(right))
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            _check_length(left.bit_length() * abs(right))
        elif operator == "%" and isinstance(left, str):
            _check_pattern(left, right)
        return _checked(super().call_binop(context, operator, left, right))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        format_method = super().wrap_str_format(value)
        if format_method is None:
            return None

        def bounded(*args: Any, **named: Any) -> str:
            _check_pattern(value.__self__, [*args, *named.values()])
            return format_method(*args, **named)

        return bounded

    def call(self, context: Any, called: Any, *args: Any, **named: Any) -> Any:
        if isinstance(getattr(called, "__self__", None), str) and called.__name__ in _WIDENS:
            _check_widths(args)
        return _checked(super().call(context, called, *args, **named))


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


def _calls(method: str, *arguments: nodes.Expr) -> nodes.Call:
    """A call of a method of the environment."""
    return nodes.Call(nodes.EnvironmentAttribute(method), [*arguments], [], None, None)


def _replace_concatenations(node: nodes.Node) -> None:
    """Each `a ~ b` by a call of `joined`."""
    for name, value in node.iter_fields():
        if isinstance(value, list):
            made = [_replaced(each) if isinstance(each, nodes.Node) else each for each in value]
            setattr(node, name, made)
        elif isinstance(value, nodes.Node):
            setattr(node, name, _replaced(value))


def _replaced(node: nodes.Node) -> nodes.Node:
    _replace_concatenations(node)
    return _calls("joined", *node.nodes) if isinstance(node, nodes.Concat) else node


def _bounded_filter(name: str, honest: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(honest)  # with what jinja2 reads to know its first argument
    def bounded(*args: Any, **named: Any) -> Any:
        if name in _WIDENS:
            _check_widths([*args, *named.values()])
        elif name == "format":
            _check_pattern(str(args[0]), [*args[1:], *named.values()])
        return _checked(honest(*args, **named))

    return bounded


def _factor(value: Any) -> int:
    """What it contributes to the length of the product of a text or list and a number."""
    return len(value) if isinstance(value, str | list | tuple) else int(value)


def _check_pattern(pattern: str, given: Any) -> None:
    """Refuses a width above the bound in the pattern of a format, or given for it."""
    _check_widths([int(digits[:12]) for digits in _NUMBERS.findall(pattern)])
    if "*" in pattern or ":{" in pattern:
        _check_widths(given if isinstance(given, list | tuple) else [given])


def _check_widths(given: Iterable[Any]) -> None:
    _check_length(max((each for each in given if isinstance(each, int)), default=0))


def _checked(made: Any) -> Any:
    _check_length(len(made) if isinstance(made, str | list | tuple) else 0)
    return made


def _end() -> NoReturn:
    raise RunawayTemplate("repeats its loops without an end")


def _check_length(length: int) -> None:
    if length > MAX_CHARS:
        raise RunawayTemplate(f"makes a text or list of more than {MAX_CHARS:,} characters")
