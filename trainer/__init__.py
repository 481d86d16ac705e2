"""The trainer. A public name is loaded when it is used."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainer.config import TrainerConfig as TrainerConfig
    from trainer.errors import TrainerError as TrainerError

    __version__: str

_MODULES = {
    "TrainerConfig": "trainer.config",
    "TrainerError": "trainer.errors",
}
__all__ = [
    "TrainerConfig",
    "TrainerError",
    "__version__",
]


def __getattr__(name: str) -> Any:
    """Loads a public name. Raises AttributeError for any other name."""
    if name == "__version__":
        from importlib.metadata import version

        return version("agentic-rl")
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_MODULES[name]), name)
