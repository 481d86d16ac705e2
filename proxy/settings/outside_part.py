"""Parts that a configuration names by the class of their section: classes of your own.

In place of the path, the name of an installed package's entry point (`plugins.py`) is taken;
the configuration then has its path.

Invariant: a name that cannot be used, or settings that the section refuses, end a run, or a proxy,
before it starts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

from pydantic import Field, ValidationError, field_validator

from proxy.errors import ConfigurationError
from proxy.settings.plugins import import_path, load_plugin
from proxy.settings.section import Section

TARGET_PATTERN = r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$"

Kind = TypeVar("Kind", bound=Section)


class OutsidePart(Section):
    """Example: OutsidePart(target="my_agents.slurm:SlurmConfig", settings={"partition": "gpu"})"""

    kind: ClassVar[str]
    """Kind of the part, which is in the group of its entry points."""
    target: str = Field(pattern=TARGET_PATTERN)
    """`module:Class` of the part's section, or the name of an entry point."""
    settings: Mapping[str, Any] = Field(default_factory=dict)
    """The keys of the part's section, with their values."""

    @field_validator("target", mode="before")
    @classmethod
    def _path(cls, target: Any) -> Any:
        return path_of(cls.kind, target)

    def section(self, kind: type[Kind]) -> Kind:
        """The settings as a section of the named class.

        Raises:
            ConfigurationError: the class cannot be imported, is not a `kind`, or refuses the
                settings.
        """
        cls = load_plugin("target", self.target, {})
        if not (isinstance(cls, type) and issubclass(cls, kind)):
            raise ConfigurationError(f"{self.target}: not a subclass of {kind.__name__}")
        try:
            return cls.model_validate(self.settings)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            key = ".".join(str(part) for part in first["loc"])
            raise ConfigurationError(f"{self.target}: settings.{key}: {first['msg']}") from None


def path_of(kind: str, name: Any) -> Any:
    """The import path of the part of this kind with that name; anything but a string unchanged.

    Raises ValueError: no installed package registers the name.
    """
    if not isinstance(name, str):
        return name
    try:
        return import_path(kind, name, {}, kind)
    except ConfigurationError as error:
        raise ValueError(error.message) from error
