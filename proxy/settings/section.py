"""The base class of the sections of a configuration file.

Invariant: a section refuses unknown keys and is immutable, so that the value read at start is the
value in use.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Annotated, Any, Final, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator

COMMON: Final = "common"
Value = TypeVar("Value")
Common = Annotated[Value, COMMON]
"""The type of a key that many people set: the reference begins a section with these, about five of
them. Example: lr: Common[float] = Field(1e-6, gt=0)"""


INTEGER_LIMIT = 2**63
"""Integers are below it in absolute value: the store, arrays and other programs hold 64 bits."""


class Settings(BaseModel):
    """Keys with values. `true` and `on` are no numbers, though Python takes them for 1."""

    @field_validator("*", mode="before", check_fields=False)
    @classmethod
    def _is_no_switch(cls, value: Any, info: ValidationInfo) -> Any:
        if info.field_name is not None and any(type(each) is bool for each in _values(value)):
            annotation = cls.model_fields[info.field_name].annotation
            kinds = set(_kinds(annotation))
            if kinds & {int, float} and bool not in kinds:
                raise ValueError("Input should be a number, and not true, false, yes or on")
        return value

    @field_validator("*", mode="after", check_fields=False)
    @classmethod
    def _is_held(cls, value: Any) -> Any:
        for each in _values(value):
            if type(each) is int and abs(each) >= INTEGER_LIMIT:
                raise ValueError("Input should be an integer of 64 bits, less than 2**63")
        return value


def _values(value: Any) -> Iterator[Any]:
    """The value, or those of a list."""
    if isinstance(value, list | tuple):
        for each in value:
            yield from _values(each)
    else:
        yield value


def _kinds(annotation: Any) -> Iterator[Any]:
    """The types that a value, or those of a list, may have."""
    if get_origin(annotation) in (Annotated, tuple, list, Union, types.UnionType):
        for each in get_args(annotation):
            yield from _kinds(each)
    else:
        yield annotation


class Section(Settings):
    """A section of a configuration file, which the code that uses it takes as it is.

    Example:
        class EvalConfig(Section):
            repeats: int = Field(1, ge=1)
            \"\"\"Trials per held-out task.\"\"\"
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
