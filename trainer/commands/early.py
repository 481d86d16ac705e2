"""Starts the vLLM servers of a run before the trainer itself is imported, which takes seconds.

A server imports for seconds, too (24 s on a machine with an H200). Only when the configuration is
complete and checked does it learn what it serves and on which GPUs (`proxy/engines/vllm_early.py`);
until then it listens nowhere and uses no GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from proxy.engines import vllm_early
from proxy.engines.vllm_server import STOP_GRACE_S, VllmConfig, asked_environment
from proxy.errors import ConfigurationError
from trainer.errors import ConfigError
from trainer.run.folder import RunFolder
from trainer.settings.values import Sources

MAX_REPLICAS = 8
"""More servers than this are not started early: they would only wait for each other."""


@contextmanager
def early_engines(sources: Sources) -> Iterator[None]:
    """A context in which the engines that `agentic-train` will probably start with this
    configuration import already. At its end, those that were not needed have ended."""
    count, variables = engines_to_start(sources)
    with suppress(ConfigurationError):  # no vLLM is installed, which is reported later
        vllm_early.begin(count, asked_environment(VllmConfig(env=variables)), STOP_GRACE_S)
    try:
        yield
    finally:
        vllm_early.end_all()


def sources_of(
    configs: Sequence[Path], words: Sequence[str], environment: Mapping[str, str]
) -> Sources:
    """The sources of the configuration of `agentic-train [resume RUN] key=value …`."""
    if words[:1] == ["resume"] and len(words) > 1:
        return Sources([RunFolder(Path(words[1])).config], words[2:], environment)
    return Sources(configs, words[1:] if words[:1] == ["train"] else words, environment)


def engines_to_start(sources: Sources) -> tuple[int, dict[str, str]]:
    """Number of vLLM servers that the command will start on this machine, and the variables that
    its configuration gives them; (0, {}) if that is not sure. Errors of the configuration are found
    later."""
    if not sources.paths or sources.environment.get("RANK", "0") != "0":
        return 0, {}
    try:
        values = sources.values
    except ConfigError:
        return 0, {}
    engine, cluster = values.get("engine") or {}, values.get("cluster") or {}
    if not isinstance(engine, Mapping) or not isinstance(cluster, Mapping):
        return 0, {}
    given = engine.get("urls") or values.get("sft") is not None
    if given or cluster.get("backend", "local") != "local":
        return 0, {}
    replicas, variables = engine.get("replicas", 1), engine.get("env") or {}
    if not isinstance(replicas, int) or not 1 <= replicas <= MAX_REPLICAS:
        return 0, {}
    if not isinstance(variables, Mapping) or not all(map(_is_text, variables.items())):
        return 0, {}
    return replicas, dict(variables)


def _is_text(pair: tuple[object, object]) -> bool:
    return all(isinstance(each, str) for each in pair)
