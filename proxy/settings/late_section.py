"""Sections of extras: a configuration names an extra by its key, and only then is it imported.

Invariant: the class of an extra's section is imported when a configuration has its key, or when all
keys are listed; a configuration without the key costs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic import GetCoreSchemaHandler, TypeAdapter
from pydantic_core import CoreSchema, core_schema

from proxy.settings.plugins import load_plugin


def load_extra(path: str) -> Any:
    """The object of an extra at `module:name`, whose module is imported now.

    Example: write: Callable[[RunFolder], Report] = load_extra("trainer.extras.report:write_report")
    """
    return load_plugin("extra", path, {})


@dataclass(frozen=True)
class LateSection:
    """The section of an extra, as the annotation of the field that names it.

    Example:
        ray: Annotated[Any, LateSection("agent_loop.extras.ray.launcher:RayConfig")] = None
    """

    path: str
    """`module:Class` of the section, or of another type that pydantic knows."""
    is_list: bool = False
    """Whether an empty list names nothing."""

    @property
    def kind(self) -> Any:
        """The section's type, which is imported now."""
        return load_extra(self.path)

    def parse(self, value: Any) -> Any:
        """What a value of a configuration describes. None, and the empty list of a list, stay as
        they are.

        Raises ValueError (pydantic's ValidationError for keys that the section refuses).
        """
        if value is None or (self.is_list and value == []):
            return value
        return TypeAdapter(self.kind).validate_python(value)

    def __get_pydantic_core_schema__(
        self, _source: Any, _handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(
            self.parse, serialization=core_schema.simple_ser_schema("any")
        )
