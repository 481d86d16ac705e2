"""The proxy process's one configuration.

Precedence: command line > environment (`AGENTIC_PROXY_…`, `__` between levels) > YAML > default.
Unknown keys are refused. Nothing listens off loopback without an admin key.
"""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError, model_validator
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from proxy.errors import ConfigurationError
from proxy.logs import LogKind
from proxy.profiles import AgentProfile


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid")


class EngineConfig(_Section):
    """One replica that samples."""

    url: str
    kind: Literal["vllm", "completions", "sglang", "text"] = "vllm"
    """How it is spoken to; `vllm` is the token-in/token-out route. `text` is a completions route
    that tells no tokens: for eval sessions only, never trained."""
    name: str | None = None
    """How `/engines` and the metrics call it; default: the URL's host and port."""
    api_key: SecretStr | None = None
    model: str | None = None
    """The model's name there; default: what the engine says."""


class RenderingConfig(_Section):
    """How messages become token ids."""

    renderer: str = "auto"
    """A renderer's name (`qwen3`, `glm-4.5`, …), `template` for the checkpoint's own chat template,
    or `auto`: the renderer that agrees with the chat template token for token."""
    template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the chat template, such as `enable_thinking`."""


class SessionsConfig(_Section):
    auto_create: bool = False
    """A path `/{any-id}/v1` makes its session and needs no key. On loopback only."""
    ttl_s: float = Field(default=24 * 3600.0, gt=0)
    """How long a session lives unless its creator says otherwise."""
    cached: int = Field(default=1000, ge=1)
    """Sessions whose token trees stay in memory; the rest are read back from the store."""
    max_turns: int = Field(default=10_000, ge=1)
    max_tokens: int = Field(default=50_000_000, ge=1)
    """Sampled tokens per session."""
    max_concurrent_calls: int = Field(default=256, ge=1)


class LimitsConfig(_Section):
    body_bytes: int = Field(default=64 * 2**20, ge=1024)
    """Largest request body; past it 413."""
    in_flight_calls: int = Field(default=4096, ge=1)
    """Calls being answered in the process; past it 429 with Retry-After."""
    keep_alive_s: float = Field(default=5.0, gt=0)
    """A waiting stream gets an SSE comment this often, so that no client gives up on it."""
    call_timeout_s: float = Field(default=3600.0, gt=0)
    """A call that has not ended after this is cut."""
    unready_s: float = Field(default=0.0, ge=0)
    """Told to stop, it first says so at `/ready` for so long, and still takes calls: a load
    balancer sends them elsewhere before the port closes."""
    shutdown_s: float = Field(default=10.0, ge=0)
    """How long calls in flight may still take when the process is told to stop."""


class RelayConfig(_Section):
    """Engines that connect in from behind a firewall (`agentic-worker`)."""

    token: SecretStr | None = None
    """What workers show; without one there is no relay."""
    window: int = Field(default=64, ge=1)
    """Frames (engine steps) of a call that may be under way or unread: the back-pressure."""
    grace_s: float = Field(default=30.0, ge=0)
    """For how long a worker that lost its connection is waited for before its calls are cut."""
    silence_s: float = Field(default=15.0, gt=0)
    """A connection over which nothing came for so long, pongs included, is dead."""
    max_workers: int = Field(default=256, ge=1)


class ProxyConfig(BaseSettings):
    model_config = SettingsConfigDict(
        extra="forbid", env_prefix="AGENTIC_PROXY_", env_nested_delimiter="__"
    )

    model: Path | None = None
    """Folder of the checkpoint: `tokenizer.json`, `tokenizer_config.json`, the chat template."""
    served_model_name: str | None = None
    """What `/v1/models` says; default: the folder's name. Any requested name is served."""
    engines: list[EngineConfig] = Field(default_factory=list)
    store: str = "sqlite:///agentic-proxy.db"
    """`sqlite:///FILE` or `postgresql://…`."""
    durability: Literal["process", "power"] = "process"
    """What a recorded turn outlives: `kill -9` of the proxy, or the machine's power, too (then each
    write waits for the disk)."""
    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535)
    public_url: str | None = None
    """What agents reach the proxy by, where it is not `http://HOST:PORT`."""
    peer_url: str | None = None
    """What other proxies on the same store reach this one by; default: host and port, or where host
    is every address, this machine's on its way out. See proxy/processes/forwarding.py."""
    admin_key: SecretStr | None = None
    """For the control plane; needed off loopback."""
    max_context_tokens: int | None = Field(default=None, ge=2)
    """Prompt and answer together; default: what the engine says, else the model's config.json."""
    policy_version: int = Field(default=0, ge=0)
    """The weights' version until an engine or the trainer says another."""
    workers: int = Field(default=1, ge=1)
    """Processes on the one port."""
    log: LogKind = "text"
    """What is said on standard error: `text`, or `json`, one object a line and one per call."""
    profiles: dict[str, AgentProfile] = Field(default_factory=dict)
    """Agent profiles beside those of proxy/profiles.yaml, or in place of them."""
    rendering: RenderingConfig = Field(default_factory=RenderingConfig)
    sessions: SessionsConfig = Field(default_factory=SessionsConfig)
    limits: LimitsConfig = Field(default_factory=LimitsConfig)
    relay: RelayConfig = Field(default_factory=RelayConfig)

    @property
    def on_loopback(self) -> bool:
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @model_validator(mode="after")
    def _guard_the_network(self) -> Self:
        if not self.on_loopback and self.admin_key is None:
            raise ValueError(
                f"host={self.host!r} can be reached from outside: set AGENTIC_PROXY_ADMIN_KEY, "
                "or listen on 127.0.0.1"
            )
        if not self.on_loopback and self.sessions.auto_create:
            raise ValueError(
                f"sessions.auto_create needs no key and host={self.host!r} can be reached from "
                "outside: switch it off, or listen on 127.0.0.1"
            )
        return self

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return (init_settings, env_settings)


def load_config(path: Path | None = None, **overrides: Any) -> ProxyConfig:
    """The configuration from YAML at `path`, the environment and `overrides` (the command line).

    Raises:
        ConfigurationError: one line that names the key, its value and what is wanted.
    """
    from_file = _read_yaml(path) if path is not None else {}

    class Loaded(ProxyConfig):
        @classmethod
        def settings_customise_sources(
            cls, settings_cls: type[BaseSettings], *sources: Any, **named: Any
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            file = InitSettingsSource(settings_cls, init_kwargs=from_file)
            return (named["init_settings"], named["env_settings"], file)

    try:
        return Loaded(**overrides)
    except (ValidationError, SettingsError) as error:
        raise ConfigurationError(_one_line(error)) from error


def _one_line(error: ValidationError | SettingsError) -> str:
    if isinstance(error, SettingsError):
        return f"environment: {error}"
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"])
    return f"{key}: {first['msg']} (value: {first['input']!r})" if key else first["msg"]


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        data = yaml.safe_load(path.read_text()) or {}
    except OSError as error:
        raise ConfigurationError(f"{path}: cannot be read: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise ConfigurationError(f"{path}: not YAML: {error}") from error
    if not isinstance(data, dict):
        raise ConfigurationError(f"{path}: a mapping of keys is wanted")
    return data
