"""The proxy's configuration. Each section is the model that the code using it takes.

Precedence: command line > environment (`AGENTIC_PROXY_…`, `__` between levels) > YAML > default.
Unknown keys are refused. The proxy listens outside loopback only if `admin_key` or
`admin_key_file` is set.
"""

from __future__ import annotations

import ipaddress
import re
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import (
    Field,
    SecretStr,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from proxy.errors import ConfigurationError
from proxy.extra_registry import section_type
from proxy.machine.logs import LogKind, LogLevel
from proxy.machine.secrecy import read_secret, shown_value, with_password, with_secret
from proxy.settings.hub import hub_name, model_folder
from proxy.settings.outside_part import OutsidePart
from proxy.settings.profiles import AgentProfile
from proxy.settings.reaching import ListeningAddress, PublicUrl
from proxy.settings.recorded import RecordedConfig
from proxy.settings.section import Common, Section
from proxy.settings.state_folder import default_store
from proxy.settings.yaml_file import read_yaml, yaml_fault

PERSON_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,40}$"
ENVIRONMENT_PREFIX = "AGENTIC_PROXY_"
SECTIONS = ("scheduling", "telemetry", "relay", "rules")
"""The sections of extras."""
ExtraSection = Any
"""A section whose type the extra's line in `proxy.extra_registry` names; None: it is not named."""


class EngineConfig(Section):
    """One replica of the engine that samples."""

    url: str
    """`http://HOST:PORT`, or `http://:KEY@HOST:PORT` if the engine needs an API key."""
    kind: str = "vllm"
    """The engine's protocol: `vllm` (the token-in/token-out route), `completions`, `sglang`, `text`
    (a completions route that does not report token ids: only for eval sessions, never trained),
    `chat` (the same for a hosted model behind `/v1/chat/completions`, which needs `model`), or the
    import path of your own client's factory, `package.module:name`."""
    name: str | None = None
    """The engine's name in `/engines`, in metrics and in the log. Default: host and port."""
    api_key: SecretStr | None = None
    """The engine's API key, sent as `Authorization: Bearer`. Default: the key in the URL."""
    api_key_file: Path | None = None
    """In place of `api_key`: a file that contains it."""
    model: str | None = None
    """The model's name in requests to the engine. Default: the first one in its `/v1/models`."""

    @model_validator(mode="before")
    @classmethod
    def _read_key(cls, data: Any) -> Any:
        return with_secret(data, "api_key")


class RenderingConfig(Section):
    """How messages become token ids."""

    renderer: str = "auto"
    """A renderer's name (`qwen3`, `glm-4.5`, …), `template` for the checkpoint's own chat template,
    `auto` for the renderer that agrees with the chat template token for token, or the import path
    of a family of your own, `package.module:FAMILY`."""
    template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the chat template, such as `enable_thinking`."""
    images: bool = True
    """Whether a model that reads images gets those of a request; else, and with a model that reads
    only text, a short text stands in their place."""
    image_urls: list[str] = Field(default_factory=list)
    """Beginnings of the URLs from which the proxy fetches images, once per session, such as
    `https://images.example.org/`. Any other URL of an image is shown as text."""

    @field_validator("image_urls")
    @classmethod
    def _check_urls(cls, urls: list[str]) -> list[str]:
        for url in urls:
            if re.match(r"https?://[^/?#@\\\s]+/", url) is None:
                raise ValueError(f"expected https://HOST/ and what follows it, got {url!r}")
        return urls


class SessionsConfig(RecordedConfig):
    """Sessions and their limits, which a session's creator can lower."""

    auto_create: Common[bool] = False
    """Whether a call to `/{any-id}/v1` creates its session and needs no key. Only on loopback."""
    ttl_s: Common[float] = Field(default=24 * 3600.0, gt=0)
    """Seconds from a session's creation to its expiry, unless its creator sets another value."""
    cached: int = Field(default=1000, ge=1)
    """Number of sessions whose token trees stay in memory; others are read from the store."""
    max_turns: Common[int] = Field(default=10_000, ge=1)
    """Number of calls per session; further calls get 403."""
    max_tokens: Common[int] = Field(default=50_000_000, ge=1)
    """Number of sampled tokens per session; calls after that get 403."""
    max_concurrent_calls: int = Field(default=256, ge=1)
    """Number of calls that a session may have in flight; further calls get 429."""


class ToolsConfig(Section):
    """Tools that an agent's provider would run, and that the proxy runs in its place. Each is the
    import path of your own coroutine function, `package.module:name`. Without one, models are not
    offered the tool."""

    web_search: str | None = None
    """Gets the query and the agent's entry of the tool, and returns results, each with `title`,
    `url` and `text`. After 30 seconds the model gets an error."""
    code_execution: str | None = None
    """Gets the code and the agent's entry of the tool, and returns `stdout`, `stderr` and
    `return_code`. After 300 seconds the model gets an error."""


class LimitsConfig(Section):
    """Limits of the process."""

    body_bytes: Common[int] = Field(default=16 * 2**20, ge=1024)
    """Maximum size of a request body after decompression; a larger one gets 413. The default is
    three times a prompt of a million tokens; parsing a body of this size delays other calls by up
    to a quarter of a second."""
    unread_s: float = Field(default=120.0, gt=0)
    """Seconds after which the connection of a client that does not read its answer is closed."""
    in_flight_calls: Common[int] = Field(default=4096, ge=1)
    """Number of calls in flight in the process; further calls get 429 with Retry-After. It is lower
    where the process may open fewer than two files for each (`ulimit -n`)."""
    in_flight_body_bytes: int = Field(default=2 * 2**30, ge=1024)
    """Total size of the request bodies in flight in the process, which are in memory until their
    calls end; a body beyond it gets 429 with Retry-After. The default is 512 KiB per call in
    flight."""
    keep_alive_s: float = Field(default=5.0, gt=0)
    """Seconds without a token after which a stream gets a comment, so that no client gives up."""
    engine_patience_s: Common[float] = Field(default=120.0, ge=0)
    """Seconds that an answer may stand still after its engine failed, while the proxy waits for an
    engine that continues it; then the call is cut with a 503. With 0 only engines that are healthy
    at that moment are asked. Time in which engines are paused does not count."""
    call_timeout_s: Common[float] = Field(default=3600.0, gt=0)
    """Seconds after which a call that has not ended is cut."""
    unready_s: float = Field(default=0.0, ge=0)
    """Seconds after SIGTERM in which the proxy returns 503 at `/ready` and still accepts calls, so
    that a load balancer can redirect them before the port closes."""
    shutdown_s: Common[float] = Field(default=10.0, ge=0)
    """Seconds that calls in flight get to finish when the process stops."""


class RetentionConfig(Section):
    """How long recorded sessions are kept; in a run, the folders of its trials, too."""

    completed_s: float | None = Field(default=None, gt=0)
    """Seconds after which a completed or expired session is removed from the store with its turns,
    rewards and events. Default: sessions are kept."""
    max_bytes: int | None = Field(default=None, gt=0)
    """Size of the store above which the sessions that ended first are removed, until it is smaller;
    only for SQLite. Sessions of the last five minutes are kept. Default: no limit."""


class ListenConfig(PublicUrl, ListeningAddress):
    """Where the proxy listens, by which names it is called, and the key of its control plane."""

    port: Common[int] = Field(default=8000, ge=0, le=65535)
    listen_fd: int | None = Field(default=None, ge=0)
    """A socket that this process inherits and that is bound to `host` and `port`, so that a process
    that restarts the proxy keeps its port. Not together with several workers."""
    allowed_hosts: list[str] = Field(default_factory=list)
    """Additional host names of the proxy: `proxy`, `*.example.org`, or `*` for any. A request whose
    `Host` is neither one of these nor that of `host`, `public_url` or `peer_url` is refused."""
    peer_url: str | None = None
    """The URL by which other proxies on the same store reach this one. Default: host and port; if
    host means all addresses, the address of this machine's default route."""
    admin_key: SecretStr | None = Field(default=None, min_length=1)
    """The key of the control plane. Default: the key in `admin_key_file`. If host is not a loopback
    address, one of the two must be set."""
    admin_key_file: Common[Path | None] = None
    """The file of the admin key. If it does not exist, the proxy creates it with mode 0600. Each
    line is a valid key, and a changed file is read again, so keys are replaced without a restart.
    Default: `FILE.admin-key` next to a SQLite store; for other stores `agentic-proxy/admin-key` in
    the user's state folder."""
    metrics_key_file: Path | None = None
    """A file of keys, one per line, that are valid for `GET /metrics` only: for Prometheus. The
    admin key is valid there, too. A changed file is read again."""
    people: dict[Annotated[str, Field(pattern=PERSON_NAME)], Path] = Field(default_factory=dict)
    """Name → a file of this person's keys, one per line, which the proxy creates if it does not
    exist. A person's key creates sessions, whose ids begin with `NAME/`, and lists, shows, rates,
    tags and deletes these alone, in place of the admin key. A changed file is read again."""

    @property
    def on_loopback(self) -> bool:
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


class OutsideExtra(OutsidePart):
    """An extra of your own, named by the class of its section (`proxy.extra.ExtraConfig`)."""

    kind = "proxy_extra"


class ProxyConfig(BaseSettings, ListenConfig):
    """All settings of one proxy. The keys of `ListenConfig` are at the top level."""

    model_config = SettingsConfigDict(
        extra="forbid", env_prefix=ENVIRONMENT_PREFIX, env_nested_delimiter="__"
    )

    dialects: list[str] = Field(default_factory=list)
    """Import paths of your own dialects, `package.module:Class`, which are added to the built-in
    ones."""
    unknown_fields: Literal["warn", "refuse"] = "warn"
    """What becomes of a request with a field that no known API has (docs/fields.md): `warn` records
    an event of the session and counts the name in the metrics; `refuse` answers 400."""
    model: Common[Path | None] = None
    """The checkpoint's folder, with `tokenizer.json`, `config.json` and the chat template; or
    `hf://owner/name` on the Hugging Face hub, also with `@revision`, which is downloaded."""
    served_model_name: str | None = None
    """The name in `/v1/models`. Default: the name of the folder, or on the hub. Requests may
    use any name."""
    engines: list[EngineConfig] = Field(default_factory=list)
    """The engines that sample. Without one, and without a relay, a vLLM is started."""
    store: Common[str] = Field(default="", validate_default=True)
    """`sqlite:///FILE` (four slashes before an absolute path), `postgresql://…`, or a URL whose
    scheme is the import path of your own store's opener, `package.module:name://…`. Default:
    `agentic-proxy/sessions.db` in the user's state folder (`$XDG_STATE_HOME` or
    `~/.local/state`), one for all folders."""
    store_password_file: Path | None = None
    """A file with the password for the store's URL, which then contains none. The password may
    have characters that are special in a URL."""
    durability: Literal["process", "power"] = "process"
    """What a recorded turn survives in SQLite: `process`: `kill -9` of the proxy; `power`: also a
    power failure (each write then waits for the disk). PostgreSQL always ensures both."""
    max_context_tokens: int | None = Field(default=None, ge=2)
    """Maximum number of tokens of a prompt and its answer. Default: the smaller of the engines'
    limit and `max_position_embeddings` in the model's config.json."""
    run: Path | None = None
    """The folder of a training run, which the page in the browser then shows, too. A run sets it
    for the proxy that it starts."""
    published_runs: Path | None = None
    """A folder for the runs that other trainers publish with `PUT /view/runs/NAME`, which the page
    in the browser then shows (docs/publishing.md). None: no run can be published."""
    workers: int = Field(default=1, ge=1)
    """Number of processes that share the port."""
    log: LogKind = "text"
    """Format of the log on standard error: `text`, or `json`, which also has one line per call."""
    log_level: LogLevel = "info"
    """The least important messages that are logged. The lines of calls are `info`."""
    profiles: dict[str, AgentProfile] = Field(default_factory=dict)
    """Agent profiles by name, which add to or replace those of proxy/profiles.yaml."""
    rendering: RenderingConfig = Field(default_factory=RenderingConfig)
    """How messages become token ids."""
    sessions: SessionsConfig = Field(default_factory=SessionsConfig)
    """Sessions and their limits."""
    tools: ToolsConfig = Field(default_factory=ToolsConfig)
    """Tools of a provider that the proxy runs."""
    limits: LimitsConfig = Field(default_factory=LimitsConfig)
    """Limits of the process."""
    scheduling: ExtraSection = None
    """Which sessions sample when the engines' KV caches are too small for all of them."""
    retention: RetentionConfig = Field(default_factory=RetentionConfig)
    """How long recorded sessions are kept."""
    telemetry: ExtraSection = None
    """Where OpenTelemetry's spans and metrics are sent."""
    relay: ExtraSection = None
    """Engines behind a firewall, which connect to the proxy."""
    rules: ExtraSection = None
    """Searches that are made in every recorded turn. They mark its session, and may end it or set
    its reward to 0 (docs/view.md)."""

    extras: list[OutsideExtra] = Field(default_factory=list)
    """Extras of your own, which have routes and metrics, and see every recorded turn: each `target`
    names the class of an extra's section (docs/notes/adding_a_part.md)."""

    @field_validator(*SECTIONS, mode="before")
    @classmethod
    def _read_section(cls, value: Any, about: ValidationInfo) -> Any:
        """An extra's section is checked by the extra's own type, which is imported only here."""
        if value is None:
            return None
        return _adapter(about.field_name or "").validate_python(value)

    @model_validator(mode="after")
    def _guard_the_network(self) -> Self:
        if not self.on_loopback and self.admin_key is None and self.admin_key_file is None:
            raise ValueError(
                f"host={self.host!r} can be reached from other machines: set"
                " AGENTIC_PROXY_ADMIN_KEY or admin_key_file, or listen on 127.0.0.1"
            )
        if not self.on_loopback and self.sessions.auto_create:
            raise ValueError(
                f"sessions.auto_create admits calls without a key, and host={self.host!r} can be"
                " reached from other machines; switch it off, or listen on 127.0.0.1"
            )
        if self.people and self.sessions.auto_create:
            raise ValueError(
                "sessions.auto_create admits calls without a key, also to sessions of people; use"
                " one of the two"
            )
        if self.listen_fd is not None and self.workers > 1:
            raise ValueError(
                f"listen_fd={self.listen_fd} is one process's socket, and workers={self.workers};"
                " set workers to 1, or leave listen_fd out"
            )
        return self

    @field_validator("store")
    @classmethod
    def _users_own(cls, store: str) -> str:
        return store or f"sqlite:///{default_store()}"

    @property
    def model_name(self) -> str:
        """The name in `/v1/models`."""
        return self.served_model_name or (self.model.name if self.model else "model")

    @property
    def store_url(self) -> str:
        """`store` with the password of `store_password_file`. Raises ConfigurationError."""
        if self.store_password_file is None:
            return self.store
        try:
            password = read_secret(self.store_password_file, "store_password_file")
        except ValueError as error:
            raise ConfigurationError(str(error)) from error
        return with_password(self.store, password)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return (init_settings, _Environment(settings_cls))


class _Environment(EnvSettingsSource):
    """The environment's variables, also those of sections of extras that they name."""

    def prepare_field_value(
        self, field_name: str, field: FieldInfo, value: Any, value_is_complex: bool
    ) -> Any:
        if field_name in SECTIONS:
            prefix = f"{ENVIRONMENT_PREFIX}{field_name}__".lower()
            if value is not None or any(name.startswith(prefix) for name in self.env_vars):
                field = FieldInfo.from_annotation(section_type(field_name))
        return super().prepare_field_value(field_name, field, value, value_is_complex)


@cache
def _adapter(name: str) -> TypeAdapter[Any]:
    return TypeAdapter(section_type(name))


def load_config(path: Path | None = None, **overrides: Any) -> ProxyConfig:
    """The configuration from YAML at `path`, the environment and `overrides` (the command line).

    Raises:
        ConfigurationError: one line with each wrong key, its value and what is allowed.
    """
    from_file = _read_yaml(path) if path is not None else {}

    class Loaded(ProxyConfig):
        """The configuration, with the YAML file as its last source."""

        @classmethod
        def settings_customise_sources(
            cls, settings_cls: type[BaseSettings], *sources: Any, **named: Any
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            file = InitSettingsSource(settings_cls, init_kwargs=from_file)
            return (named["init_settings"], _Environment(settings_cls), file)

    try:
        config = Loaded(**overrides)
    except (ValidationError, SettingsError) as error:
        raise ConfigurationError(_one_line(error)) from error
    if config.model is None or (folder := model_folder(config.model)) == config.model:
        return config
    name = (hub_name(config.model) or config.model.name).partition("@")[0]
    update = {"model": folder, "served_model_name": config.served_model_name or name}
    return config.model_copy(update=update)


_WITHOUT_VALUE = ("missing", "extra_forbidden")
"""Errors that do not depend on the value, which may be a secret under a mistyped key."""


def _one_line(error: ValidationError | SettingsError) -> str:
    if isinstance(error, SettingsError):
        return f"environment: {error}"
    return "; ".join(_said(".".join(map(str, e["loc"])), e) for e in error.errors())


def _said(key: str, error: ErrorDetails) -> str:
    if not key:
        return error["msg"]
    value = "" if error["type"] in _WITHOUT_VALUE else shown_value(error["loc"], error["input"])
    return f"{key}: {error['msg']}{value}"


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        data = read_yaml(path) or {}
    except OSError as error:
        raise ConfigurationError(f"{path}: cannot read the file: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise ConfigurationError(f"{path}: the file is not YAML: {yaml_fault(error)}") from error
    if not isinstance(data, dict):
        raise ConfigurationError(
            f"{path}: the file must be a mapping of keys to values, not a list or a string"
        )
    return data
