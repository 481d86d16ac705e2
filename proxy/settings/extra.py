"""Sections of extras: a configuration names an extra by its key, and only then is it imported.

Invariant: the class of an extra's section is imported when a configuration has its key, or when all
keys are listed; a configuration without the key costs nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from proxy.settings.plugins import load_plugin
from proxy.settings.section import Section


def extra(path: str) -> Any:
    """The object of an extra at `module:name`, whose module is imported now.

    Example: write: Callable[[RunFolder], Report] = extra("trainer.extras.report:write_report")
    """
    return load_plugin("extra", path, {})


@dataclass(frozen=True)
class Extra:
    """The section of an extra, as the annotation of the field that names it.

    Example:
        ray: Annotated[LauncherConfig | None, Extra("agent_loop.extras.ray.launcher:RayConfig")] = (
            None
        )
    """

    path: str
    """`module:Class` of the section."""

    @property
    def section(self) -> type[Section]:
        """The class of the section, which is imported now."""
        found: type[Section] = extra(self.path)
        return found

    def parse(self, value: Any) -> Section | None:
        """The section that a value of a configuration describes; None for None.

        Raises ValueError (pydantic's ValidationError for keys that the section refuses).
        """
        if value is None:
            return None
        section = self.section
        if isinstance(value, section):
            return value
        if not isinstance(value, Mapping):
            raise ValueError(f"give a section with keys, such as {', '.join(section.model_fields)}")
        return section.model_validate(value)

    def __get_pydantic_core_schema__(
        self, _source: Any, _handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(
            self.parse, serialization=core_schema.simple_ser_schema("any")
        )
