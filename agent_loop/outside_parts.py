"""Parts that a configuration names as `module:Class`: a launcher or a reward of your own.

The class is the part's section, a subclass of `LauncherConfig` or `RewardConfig`, whose `build`
makes the part. Invariant: a name that cannot be used is a `ConfigurationError` before a run starts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import Field, ValidationError

from proxy.errors import ConfigurationError
from proxy.plugins import load_plugin
from proxy.section import Section

TARGET_PATTERN = r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$"

Kind = TypeVar("Kind", bound=Section)


class OutsidePart(Section):
    """Example: OutsidePart(target="my_agents.slurm:SlurmConfig", settings={"partition": "gpu"})"""

    target: str = Field(pattern=TARGET_PATTERN)
    """`module:Class` of the part's section."""
    settings: Mapping[str, Any] = Field(default_factory=dict)
    """The keys of the part's section, with their values."""

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
