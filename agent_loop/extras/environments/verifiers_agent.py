"""What runs in the Python of `verifiers` environments, which is not the trainer's.

`play` runs one episode of an environment and returns its reward; `list_tasks` prints the tasks of
its taskset. Of this project, it can import the modules that need the standard library alone.
Invariant: the policy is called through the session of the trial only, and an episode that the
environment could not finish, or in which the policy has no run, has no reward.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

from verifiers.v1 import EvalClientConfig, ModelContext, SamplingConfig
from verifiers.v1.configs.agent import agent_config_fields
from verifiers.v1.utils.loaders import load_environment, resolve_env_config

KEY = "OPENAI_API_KEY"
"""The variable that has the session's key; programs that the environment starts do not get it."""


@dataclass(frozen=True, slots=True)
class VerifiersCall:
    """An episode to play. `env` has the settings of the environment, `data` a task's wire data."""

    env: Mapping[str, Any]
    harness: str | None
    data: Mapping[str, Any]
    base_url: str
    model: str
    seed: int


def environment(settings: Mapping[str, Any], harness: str | None = None) -> Any:
    """The environment. Where the settings of a seat say nothing else, it has this harness, and
    runs as a process of this machine."""
    merged, given = dict(settings), {"harness": {"id": harness}} if harness else {}
    for seat in agent_config_fields(resolve_env_config(merged)):
        merged[seat] = {"runtime": {"type": "subprocess"}, **given, **merged.get(seat, {})}
    return load_environment(resolve_env_config(merged))


async def play(call: VerifiersCall) -> dict[str, Any] | None:
    """The rewards and metrics of the policy's runs, by name, with their sum as `reward`; None if
    the episode has no such run; or `error`, if the environment failed."""
    env = environment(call.env, call.harness)
    kind = type(env.taskset).task_type()
    task = kind(kind.data_type().model_validate(dict(call.data)), env.config.taskset.task)
    client = EvalClientConfig(base_url=call.base_url, api_key_var=KEY)
    context = ModelContext(client=client, model=call.model, sampling=SamplingConfig())
    async with env.serving():
        episode = await env.run_episode(task, context)
    if not episode.ok:
        errors = chain(episode.errors, *(trace.errors for trace in episode.traces))
        return {"error": "; ".join(f"{error.type}: {error.message}" for error in errors)}
    return _rewards(episode)


def _rewards(episode: Any) -> dict[str, Any] | None:
    played = [trace for trace in episode.traces if trace.agent.trainable]
    if not played:
        return None
    parts: dict[str, float] = {}
    for trace in played:
        seat = f"{trace.agent.name}." if len(played) > 1 else ""
        scores = {name: reward.score for name, reward in trace.rewards.items() if reward}
        found = {**trace.metrics, **scores}
        parts |= {f"{seat}{name}": value for name, value in found.items() if value is not None}
    return {**parts, "reward": sum(trace.reward for trace in played)}


def list_tasks(settings: Mapping[str, Any], limit: int) -> Iterator[dict[str, Any]]:
    """The first tasks: an id, the text of the prompt, and the wire data that `play` needs."""
    for task in islice(environment(settings).taskset, limit):
        data = task.data.model_dump(mode="json", exclude_none=True)
        name = task.data.id or task.data.name or str(task.data.idx)
        yield {"task_id": name, "prompt": task.data.prompt_text, "verifiers": data}


def main() -> None:
    settings, limit = sys.argv[1:]
    for row in list_tasks(json.loads(settings), int(limit)):
        sys.stdout.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
