"""The kinds of engines, by the value of `engines.kind` in the configuration.

For a kind from outside the package, the value is the import path of its factory, which implements
`MakeEngine`: `kind: my_package.my_engine:make_engine`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from proxy.config import EngineConfig
from proxy.engines.protocol import Engine
from proxy.settings.plugins import load_plugin

if TYPE_CHECKING:
    from proxy.rendering.rendering import Rendering

ENGINES = {
    "vllm": "proxy.engines.vllm:VllmEngine.from_config",
    "completions": "proxy.extras.engines.completions:CompletionsEngine.from_config",
    "sglang": "proxy.extras.engines.sglang:SglangEngine.from_config",
    "text": "proxy.extras.engines.text:TextEngine.from_config",
    "chat": "proxy.extras.engines.chat:ChatEngine.from_config",
}
"""Kind → import path of the factory."""


class MakeEngine(Protocol):
    """Creates the client of one replica without connecting to it. `rendering` is that of the
    proxy's model: with it, an engine that takes messages or text renders, and reads, what it must
    (`rendering.full`, `rendering.tokenizer`).

    Raises ConfigurationError for an invalid URL or key.
    """

    def __call__(self, config: EngineConfig, rendering: Rendering) -> Engine: ...


def make_engine(config: EngineConfig, rendering: Rendering) -> Engine:
    """The client of the replica that `config` describes.

    Raises:
        ConfigurationError: the kind is unknown, or its factory refuses the configuration.
    """
    make: MakeEngine = load_plugin("engines.kind", config.kind, ENGINES)
    return make(config, rendering)
