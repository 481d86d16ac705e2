"""The base class of the sections of a configuration file.

Invariant: a section refuses unknown keys and is immutable, so that the value read at start is the
value in use.
"""

from __future__ import annotations

from typing import Annotated, Final, TypeVar

from pydantic import BaseModel, ConfigDict

COMMON: Final = "common"
Value = TypeVar("Value")
Common = Annotated[Value, COMMON]
"""The type of a key that many people set: the reference begins a section with these, about five of
them. Example: lr: Common[float] = Field(1e-6, gt=0)"""


class Section(BaseModel):
    """A section of a configuration file, which the code that uses it takes as it is.

    Example:
        class EvalConfig(Section):
            repeats: int = Field(1, ge=1)
            \"\"\"Trials per held-out task.\"\"\"
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
