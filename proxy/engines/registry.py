"""The kinds of engines, by the value of `engines.kind` in the configuration.

For a kind from outside the package, the value is the import path of its factory, which implements
`MakeEngine`: `kind: my_package.my_engine:make_engine`.
"""

from __future__ import annotations

from typing import Protocol

from proxy.config import EngineConfig
from proxy.engines.protocol import Engine
from proxy.rendering.rendering import Rendering
from proxy.rendering.tokenizer import Tokenizer
from proxy.settings.plugins import load_plugin

ENGINES = {
    "vllm": "proxy.engines.vllm:VllmEngine.from_config",
    "completions": "proxy.extras.engines.completions:CompletionsEngine.from_config",
    "sglang": "proxy.extras.engines.sglang:SglangEngine.from_config",
    "text": "proxy.extras.engines.text:TextEngine.from_config",
    "chat": "proxy.extras.engines.chat:ChatEngine.of_model",
}
"""Kind → import path of the factory."""
_TAKE_MESSAGES = frozenset({"chat"})
"""Kinds whose factory gets the renderer instead of the tokenizer."""


class MakeEngine(Protocol):
    """Creates the client of one replica without connecting to it.

    Raises ConfigurationError for an invalid URL or key.
    """

    def __call__(self, config: EngineConfig, tokenizer: Tokenizer) -> Engine: ...


def make_engine(config: EngineConfig, rendering: Rendering) -> Engine:
    """The client of the replica that `config` describes.

    Raises:
        ConfigurationError: the kind is unknown, or its factory refuses the configuration.
    """
    make = load_plugin("engines.kind", config.kind, ENGINES)
    made: Engine = make(config, rendering if config.kind in _TAKE_MESSAGES else rendering.tokenizer)
    return made
