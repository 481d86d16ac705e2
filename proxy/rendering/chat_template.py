"""Renders a checkpoint's own chat template (Jinja) like transformers.

Invariant: a rendering ends. A template that repeats its loops and macros too often, or whose text
grows too large, is refused: `MAX_STEPS` and `MAX_CHARS` are far above what any conversation needs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache, wraps
from types import GeneratorType
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import (
    ImmutableSandboxedEnvironment,
    SandboxedEscapeFormatter,
    SandboxedFormatter,
)

from proxy.errors import ConfigurationError, RequestError

MAX_STEPS = 1_000_000
"""Repetitions of loops and calls of macros in one rendering, besides `STEPS_PER_MESSAGE`; they take
about a second, of macros five."""
STEPS_PER_MESSAGE = 10_000
"""Templates exist that go through all messages once for each message."""
MAX_CHARS = 1 << 26
"""Length of a text or list that a template makes: more than any context holds."""

MAX_MADE_CHARS = 1 << 30
"""Of all texts and lists that a rendering makes, besides `MADE_CHARS_PER_MESSAGE`: a template may
keep each of them."""
MADE_CHARS_PER_MESSAGE = 1 << 22
"""Templates exist that add each message to a text of all before."""
MAX_BITS = 1 << 20
"""Of a number that a template makes."""

_WIDENS = frozenset(
    {"batch", "center", "expandtabs", "indent", "ljust", "rjust", "slice", "to_bytes", "zfill"}
)
"""Methods and filters that make as much as a number says."""
_REPEATS = {"expandtabs": "\t", "indent": "\n", "urlize": " ", "wordwrap": ""}
"""Those that put something into a text again and again → what it comes after."""
_READS = frozenset(
    {
        *("abs", "attr", "batch", "count", "d", "default", "dictsort", "first", "float", "groupby"),
        *("int", "items", "last", "length", "list", "map", "max", "min", "random", "reject"),
        *("rejectattr", "reverse", "round", "select", "selectattr", "slice", "sort", "unique"),
    }
)
"""Filters that make no text of a list. They may go through a long one often."""
_VALUE_CHARS = 16
"""What a value of a list counts as, so that long lists are refused before they are gone through."""
_TEXT = (str, bytes, bytearray)
_MEASURED = (*_TEXT, list, tuple)
_NESTED = (list, tuple, dict)
_OWNERS = (*_TEXT, int)
_NUMBERS = re.compile(r"\d+")


@dataclass(slots=True)
class _Allowed:
    steps: int
    chars: int


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
        try:
            self._template = _compiled(source)
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
        steps = MAX_STEPS + STEPS_PER_MESSAGE * len(messages)
        chars = MAX_MADE_CHARS + MADE_CHARS_PER_MESSAGE * len(messages)
        _allowed.set(_Allowed(steps, chars))
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


@lru_cache(maxsize=32)
def _compiled(source: str) -> Template:
    """Raises TemplateError, RecursionError."""
    environment = _Bounded(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, loopcontrols],
        finalize=_shown,
    )
    environment.filters["tojson"] = _tojson
    for name, honest in environment.filters.items():
        environment.filters[name] = environment.bounded_filter(name, honest)
    del environment.globals["lipsum"]  # writes as much as it is asked for
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment.from_string(source)


class _Bounded(ImmutableSandboxedEnvironment):
    """Counts what a template repeats, and measures what it makes."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    @staticmethod
    def concat(parts: Iterable[str]) -> str:
        """What is written by the template, a macro or a block."""
        found = [*parts]
        _check_length(sum(map(len, found)))
        made: str = _checked("".join(found))
        return made

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
        return self.concat(str(_shown(part)) for part in parts)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator in ("*", "**") and isinstance(left, int) and isinstance(right, int):
            _check_number(left, right, operator)
        elif operator == "*" and not (
            isinstance(left, int | float) and isinstance(right, int | float)
        ):
            _check_length(_factor(left) * _factor(right))
        elif operator == "%" and isinstance(left, _TEXT):
            _check_pattern(left, right)
        return _checked(super().call_binop(context, operator, left, right))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Each field's format is measured when it is known: it may be made of other fields."""
        if super().wrap_str_format(value) is None:
            return None
        pattern, is_map = value.__self__, value.__name__ == "format_map"
        escape = getattr(pattern, "escape", None)
        formatter = _EscapeFormatter(self, escape=escape) if escape else _Formatter(self)

        def bounded(*args: Any, **named: Any) -> str:
            if is_map:
                (named,), args = args, ()
            largest = max(map(_size, [*args, *named.values()]), default=0)
            _check_length(len(pattern) + pattern.count("{") * largest)
            text: str = type(pattern)(formatter.vformat(pattern, args, named))
            return text

        return bounded

    def call(self, context: Any, called: Any, *args: Any, **named: Any) -> Any:
        owner = getattr(called, "__self__", None)
        if owner is not None and isinstance(owner, _OWNERS):
            if called.__name__ == "join" and args:
                args = (_listed(args[0]), *args[1:])
                _check_made("join", args[0], [owner])
            else:
                _check_made(called.__name__, owner, [*args, *named.values()])
        return self._bounded(super().call(context, called, *args, **named))

    def bounded_filter(self, name: str, honest: Callable[..., Any]) -> Callable[..., Any]:
        # What jinja2 itself gives to a filter before the template's values.
        own = int(hasattr(honest, "jinja_pass_arg"))

        @wraps(honest)
        def bounded(*args: Any, **named: Any) -> Any:
            before, (first, *others) = args[:own], args[own:]
            if name not in _READS:
                first = _listed(first)
                _check_made(name, first, [*others, *named.values()])
            elif name in _WIDENS:
                _check_widths([*others, *named.values()])
            return self._bounded(honest(*before, first, *others, **named))

        return bounded

    def _bounded(self, made: Any) -> Any:
        """A generator is counted like a loop when something goes through it."""
        if isinstance(made, GeneratorType):
            return map(_checked, self.counted(made))
        return _checked(made)


class _Formatter(SandboxedFormatter):
    def format_field(self, value: Any, format_spec: str) -> Any:
        _check_pattern(format_spec, ())
        return super().format_field(value, format_spec)


class _EscapeFormatter(SandboxedEscapeFormatter):
    def format_field(self, value: Any, format_spec: str) -> str:
        _check_pattern(format_spec, ())
        return super().format_field(value, format_spec)


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


def _shown(value: Any) -> Any:
    """What becomes text. A list may have the same long text many times."""
    if isinstance(value, _NESTED):
        _check_length(_size(value))
    return value


def _listed(values: Any) -> Any:
    return [*values] if isinstance(values, map | range) else values


def _size(value: Any, indent: int = 0) -> int:
    """About the length of its text, or a little more than `MAX_CHARS`. `indent`: what precedes a
    value for each list that it is in."""
    if isinstance(value, _TEXT):
        return len(value)
    size, left = 0, [(value, 1)]
    while left and size <= MAX_CHARS:
        each, depth = left.pop()
        size += len(each) if isinstance(each, _TEXT) else 1
        if isinstance(each, _NESTED):
            size += len(each) * (_VALUE_CHARS + indent * depth)
            if size <= MAX_CHARS:
                inner = [*each, *each.values()] if isinstance(each, dict) else each
                left += [(one, depth + 1) for one in inner]
    return size


def _check_made(name: str, value: Any, given: Sequence[Any]) -> None:
    """Refuses a method or filter that would make too much of `value`, a text or list."""
    size = _size(value)
    if name in _WIDENS:
        _check_widths(given)
    if name in _REPEATS and isinstance(value, str):
        inserts = given if name in _WIDENS else [each for each in given if isinstance(each, str)]
        size += (value.count(_REPEATS[name]) + 1) * max(map(_inserted, inserts), default=0)
    elif name == "tojson":
        size = _size(value, max(map(_inserted, given), default=0))
    elif name == "replace" and len(given) > 1 and isinstance(value, _TEXT):
        found = len(value) + 1
        if isinstance(given[0], type(value)):
            found = value.count(given[0])  # type: ignore[arg-type]
        size += found * _size(given[1])
    elif name == "join" and isinstance(value, _MEASURED):
        size += len(value) * max(map(_size, given), default=0)
    elif name == "translate":
        size *= 1 + _size([*given])
    elif name == "format":  # the filter, which is `%`
        _check_pattern(str(value), tuple(given))
    _check_length(size)


def _inserted(value: Any) -> int:
    """Characters that it says are put between others."""
    if isinstance(value, bool):
        return 0
    return value if isinstance(value, int) else len(value) if isinstance(value, _TEXT) else 0


def _factor(value: Any) -> int:
    """What it contributes to the length of the product of a text or list and a number."""
    return len(value) if isinstance(value, str | list | tuple) else int(value)


def _check_pattern(pattern: str | bytes | bytearray, given: Any) -> None:
    """Refuses a width above the bound in the pattern of a format, or given for it, and values that
    are too long together."""
    text = pattern if isinstance(pattern, str) else pattern.decode("latin-1")
    _check_widths([int(digits[:12]) for digits in _NUMBERS.findall(text)])
    values = given if isinstance(given, tuple) else (given,)
    if "*" in text:
        _check_widths(values)
    _check_length(len(text) + text.count("%") * max(map(_size, values), default=0))


def _check_widths(given: Iterable[Any]) -> None:
    _check_length(max((each for each in given if isinstance(each, int)), default=0))


def _check_number(left: int, right: int, operator: str) -> None:
    bits = left.bit_length()
    if (bits * abs(right) if operator == "**" else bits + right.bit_length()) > MAX_BITS:
        raise RunawayTemplate(f"makes a number of more than {MAX_BITS:,} bits")


def _checked(made: Any) -> Any:
    length = len(made) if isinstance(made, _MEASURED) else 0
    _check_length(length)
    allowed = _allowed.get(None)
    if allowed is not None:  # jinja2 computes constants before the first rendering
        allowed.chars -= length
        if allowed.chars < 0:
            raise RunawayTemplate(f"makes texts of more than {MAX_MADE_CHARS:,} characters")
    return made


def _end() -> NoReturn:
    raise RunawayTemplate("repeats its loops without an end")


def _check_length(length: int) -> None:
    if length > MAX_CHARS:
        raise RunawayTemplate(f"makes a text or list of more than {MAX_CHARS:,} characters")
