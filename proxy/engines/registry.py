"""The kinds of engines, by the value of `engines.kind` in the configuration.

For a kind from outside the package, the value is the import path of its factory, which implements
`MakeEngine`: `kind: my_package.my_engine:make_engine`.
"""

from __future__ import annotations

from typing import Protocol

from proxy.config import EngineConfig
from proxy.engines.protocol import Engine
from proxy.plugins import load_plugin
from proxy.rendering.tokenizer import Tokenizer

ENGINES = {
    "vllm": "proxy.engines.vllm:VllmEngine.from_config",
    "completions": "proxy.engines.completions:CompletionsEngine.from_config",
    "sglang": "proxy.engines.sglang:SglangEngine.from_config",
    "text": "proxy.engines.text:TextEngine.from_config",
}
"""Kind → import path of the factory."""


class MakeEngine(Protocol):
    """Creates the client of one replica without connecting to it.

    Raises ConfigurationError for an invalid URL or key.
    """

    def __call__(self, config: EngineConfig, tokenizer: Tokenizer) -> Engine: ...


def make_engine(config: EngineConfig, tokenizer: Tokenizer) -> Engine:
    """The client of the replica that `config` describes.

    Raises:
        ConfigurationError: the kind is unknown, or its factory refuses the configuration.
    """
    make: MakeEngine = load_plugin("engines.kind", config.kind, ENGINES)
    return make(config, tokenizer)
