"""Parts of an algorithm: each is one class with its formula, its settings and its source.

Each kind of part (advantage, loss, aggregation, …) has a protocol and, below its classes in the
same module, one registry, `Parts`. The configuration chooses a part by its `name`. A part of your
own is `module:Class`, for an advantage or a loss also `module:function`, or the name of an entry
point of an installed package:

    advantage: {name: "my_package.advantages:Median", floor: 0.1}
    loss: {name: "my_package.losses:clipped_once", bound: 2.0}
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, Self, TypeVar, cast

from pydantic import ConfigDict, GetCoreSchemaHandler, model_validator
from pydantic_core import CoreSchema, core_schema
from torch import Tensor

from agent_loop.outside_parts import check_signature, named_function
from proxy.errors import ConfigurationError
from proxy.settings.plugins import import_path, load_plugin
from proxy.settings.section import Settings
from trainer.errors import TrainingError

MAX_FACTOR = 1e3
"""Largest factor of rewards, and of a term of the loss: a reward at its limit times this still has
finite gradients in float32."""
MAX_BOUND = 1e9
"""Largest bound of ratios, values and rewards, which float32 holds."""
MAX_COUNT = 2**31 - 1
"""Largest number of tokens or rollouts."""


class Part(Settings):
    """The immutable settings of a part. The class of a kind of part adds the formula."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class NamedPart(Part):
    """A part that is chosen by its name."""

    name: str = ""
    """The name that chooses the part. For a class outside this package, the registry sets it to
    `module:Class`."""


class FunctionPart(NamedPart):
    """A part whose formula is a function, `name`; its settings are the function's keyword
    arguments. The parameters of a subclass's `__call__` are those of the function."""

    model_config = ConfigDict(extra="allow", frozen=True, allow_inf_nan=False)

    def called(self, *arguments: Any) -> Any:
        """What the function returns."""
        return named_function(self.name)(*arguments, **(self.model_extra or {}))

    @model_validator(mode="after")
    def _has_the_signature(self) -> Self:
        check_signature(self.name, type(self).__call__, self.model_extra or {})
        return self


P = TypeVar("P", bound=NamedPart)


@dataclass(frozen=True)
class Parts(Generic[P]):
    """The registry of one kind of part, and the validator of every field that holds one.

    Example: LOSSES = Parts(Loss, (Ppo, Gspo)), and in a model `loss: Annotated[Loss, LOSSES]`:
        loss: gspo                          # a name alone takes the default settings
        loss: {name: ppo, clip_high: 0.3}
        loss: {name: "my_package:MyLoss"}
    """

    kind: type[NamedPart]
    """The protocol that a class from outside must subclass."""
    classes: tuple[type[P], ...]
    """The classes of this package; each has its name as the default of its field `name`."""
    of_function: type[P] | None = None
    """The `FunctionPart` of this kind; None: a part of your own is a class."""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name_of(each) for each in self.classes)

    @property
    def _kind(self) -> str:
        return self.kind.__name__.lower()

    def find(self, name: str) -> type[P]:
        """The class with that name, or the class of a function with that name.

        Raises ValueError: it does not exist or is of another kind.
        """
        kind = self._kind
        known = {name_of(each): f"{each.__module__}:{each.__qualname__}" for each in self.classes}
        try:
            found = load_plugin(kind, name, known, kind)
        except ConfigurationError as error:
            raise ValueError(error.message) from error
        if self.of_function is not None and callable(found) and not isinstance(found, type):
            return self.of_function
        if not (isinstance(found, type) and issubclass(found, self.kind)):
            nor = " and not a function" if self.of_function else ""
            raise ValueError(
                f"{kind} {name!r} is not a subclass of "
                f"{self.kind.__module__}.{self.kind.__qualname__}{nor}"
            )
        return cast("type[P]", found)

    def parse(self, value: Any) -> P:
        """The part that a value of the configuration describes: a part, its name, or a mapping with
        its name and settings.

        Raises ValueError (pydantic's ValidationError for settings that the part refuses).
        """
        if isinstance(value, self.kind):
            own = f"{type(value).__module__}:{type(value).__qualname__}"
            return cast("P", value if value.name else value.model_copy(update={"name": own}))
        if isinstance(value, str):
            value = {"name": value}
        if not isinstance(value, Mapping) or not isinstance(value.get("name"), str):
            raise ValueError(
                f"give a name, one of {', '.join(self.names)}, or a mapping with a key name"
            )
        name = value["name"]
        part = self.find(name)
        if name not in self.names:
            name = import_path(self._kind, name, {}, self._kind)
        return part.model_validate({**value, "name": name})

    def __get_pydantic_core_schema__(
        self, _source: Any, _handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(
            self.parse, serialization=core_schema.simple_ser_schema("any")
        )


def name_of(part: type[NamedPart]) -> str:
    """The name by which the configuration chooses the class."""
    return str(part.model_fields["name"].default)


def column_of(target: str, what: str, value: object, like: Tensor) -> Tensor:
    """The value that a function returned: one number for each token, as in the column `like`.

    Raises:
        TrainingError: it is something else.
    """
    if isinstance(value, Tensor) and value.shape == like.shape:
        return value
    got = f"a {type(value).__name__}"
    if isinstance(value, Tensor):
        got = f"a tensor of shape {list(value.shape)}"
    raise TrainingError(
        f"{target} returned {got}; it must return one {what} for each token, a tensor of shape "
        f"{list(like.shape)}"
    )
