"""`agentic-proxy serve --upstream URL`: records agents on a hosted model, without a checkpoint.

The record holds the text of messages, reasoning and calls. Its tokens are those of a small
tokenizer of our own (`examples/text_only`), which no model was trained with, and its answers have
no log-probabilities. So it is for reading, evaluation and fine-tuning on the text, and
reinforcement learning refuses it: the sessions are of kind `eval`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pydantic import SecretStr

from proxy.config import EngineConfig, ProxyConfig, RenderingConfig
from proxy.errors import ConfigurationError

_PACKAGES = Path(__file__).resolve().parents[3]
_INSTALLED = _PACKAGES / "agentic_rl_examples"
TEXT_ONLY = (_INSTALLED if _INSTALLED.is_dir() else _PACKAGES / "examples") / "text_only" / "model"
RENDERER = "qwen3"
"""It inserts marks by their ids. With `split_special_tokens` the same characters in a text are only
characters, so that an answer that quotes them is recorded as it is."""


def with_upstream(
    config: ProxyConfig, url: str, model: str | None, environment: Mapping[str, str]
) -> ProxyConfig:
    """The configuration with the hosted model as its only engine, and our own tokenizer unless it
    names a checkpoint. The key is in ANTHROPIC_API_KEY for Anthropic's host, else in
    OPENAI_API_KEY.

    Raises:
        ConfigurationError: the model's name or the key is missing, or there are other engines.
    """
    variable = key_variable(url)
    if config.engines:
        raise ConfigurationError("--upstream: the proxy has other engines; give one or the others")
    if model is None:
        raise ConfigurationError(f"--upstream-model: missing; name the model at {url}")
    if not (key := environment.get(variable)):
        raise ConfigurationError(f"{variable}: not set; set it to your key of {url}")
    engine = EngineConfig(url=url, kind="chat", model=model, api_key=SecretStr(key))
    changed: dict[str, Any] = {"engines": [engine]}
    if config.model is None:
        changed |= {
            "model": TEXT_ONLY,
            "served_model_name": config.served_model_name or model,
            "rendering": RenderingConfig(renderer=RENDERER),
        }
    return config.model_copy(update=changed)


def key_variable(url: str) -> str:
    """The variable in which people keep the key of the provider."""
    host = urlsplit(url).hostname or ""
    return "ANTHROPIC_API_KEY" if f".{host}".endswith(".anthropic.com") else "OPENAI_API_KEY"
