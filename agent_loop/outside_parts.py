"""Functions of your own that a configuration names, as `module:function` or
`path/to/file.py:function`. A class of your own is a `proxy.settings.outside_part.OutsidePart`.

In place of the path, the name of an installed package's entry point (`plugins.py`) is taken;
the configuration then has its path.

Invariant: a name that cannot be used, or a function with another signature than its kind has, is
refused before a run starts.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Self

from pydantic import BeforeValidator, Field, field_validator, model_validator

from proxy.errors import ConfigurationError
from proxy.settings.outside_part import path_of
from proxy.settings.plugins import load_plugin
from proxy.settings.section import Section

FUNCTION_PATTERN = r"^([A-Za-z_][\w.]*|[^:]+\.py):[A-Za-z_]\w*$"
"""`module:function`, or `path/to/file.py:function`."""


def named_as(kind: str) -> BeforeValidator:
    """Replaces the name of an entry point in a field. Example: Annotated[str, named_as("agent")]"""
    return BeforeValidator(lambda name: path_of(kind, name))


class OwnFunction(Section):
    """A function of your own. The parameters of a subclass's `__call__` are those of the function.

    A string is short for the `target` alone. Example of a subclass:
        class GroupFilter(OwnFunction):
            kind = "filter"

            def __call__(self, group: Group) -> bool:
                return bool(self.called(group))
    """

    kind: ClassVar[str]
    """Kind of the function, which is in the group of its entry points."""
    target: str = Field(pattern=FUNCTION_PATTERN)
    """`module:function`, `path/to/file.py:function`, or the name of an entry point."""
    settings: Mapping[str, Any] = Field(default_factory=dict)
    """Keyword arguments of every call."""

    def called(self, *arguments: Any) -> Any:
        """What the function returns."""
        return named_function(self.target)(*arguments, **self.settings)

    @field_validator("target", mode="before")
    @classmethod
    def _path(cls, target: Any) -> Any:
        return path_of(cls.kind, target)

    @model_validator(mode="before")
    @classmethod
    def _from_name(cls, value: Any) -> Any:
        return {"target": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _has_the_signature(self) -> Self:
        check_signature(self.target, type(self).__call__, self.settings)
        return self


def named_function(target: str) -> Callable[..., Any]:
    """The function with that name. Raises ValueError: it cannot be imported, or cannot be called
    directly."""
    name = target.rpartition(":")[2]
    try:
        function: Callable[..., Any] = load_plugin(name, target, {})
    except ConfigurationError as error:
        raise ValueError(error.message) from error
    if not callable(function) or inspect.iscoroutinefunction(function):
        kind = "is async" if callable(function) else f"is a {type(function).__name__}"
        raise ValueError(f"{target} {kind}; name a function without async")
    return function


def check_signature(target: str, method: Callable[..., Any], settings: Mapping[str, Any]) -> None:
    """Checks that the function `target` takes the arguments of `method` without its `self`, and
    the settings as keyword arguments.

    Raises:
        ValueError: it does not, or cannot be used; the message has the right signature.
    """
    function = named_function(target)
    wanted = inspect.signature(method)
    arguments = list(wanted.parameters.values())[1:]
    keywords = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in settings]
    try:
        own = inspect.signature(function)
    except ValueError:  # a function of C code without a signature
        return
    try:
        own.bind(*arguments, **settings)
    except TypeError as error:
        name = target.rpartition(":")[2]
        right = str(wanted.replace(parameters=[*arguments, *keywords])).replace("'", "")
        raise ValueError(
            f"{target} has the signature {name}{own}: {error}; write it as def {name}{right}"
        ) from None
