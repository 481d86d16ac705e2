"""`RemoteAgentLoop` as an agent loop of verl (0.9.1): black-box agents, trained with verl.

There are two ways to configure it. By name: verl imports this module
(`actor_rollout_ref.model.external_lib=agent_loop.extras.verl.agent_loop`), and the settings are
under `remote_agent` of verl's configuration:

    actor_rollout_ref.rollout.agent.default_agent_loop=agentic

By a YAML file (`actor_rollout_ref.rollout.agent.agent_loop_config_path`):

    - name: agentic
      _target_: agent_loop.extras.verl.agent_loop.AgenticLoop
      settings: {command: {argv: ["python", "agent.py"]}, trials_dir: /tmp/trials}

Each of verl's workers runs one recording proxy in its event loop. The proxy's engine is verl's own
client, so that verl remains in charge of routing, weight updates and pauses.

Invariant: the ids that verl trains on are the ids that its servers received and returned, and each
token that the policy sampled is trained in at most one output. With verl's v1 manager, each branch
of a trial's tree is an output, and a trial without a reward raises, so that verl drops its group.
v0 takes one output per trial: it gets the branch with the most trained tokens. For a failed trial
it gets a response without trained tokens and with reward 0, because v0 cannot leave a sample out.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import numpy as np
import ray
from aiohttp import web
from omegaconf import OmegaConf
from pydantic import Field, ValidationError, model_validator
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput, register

from agent_loop.errors import AgentLoopError
from agent_loop.extras.ray.here import RayHere
from agent_loop.extras.verl.engine import VerlEngine
from agent_loop.records import Rollout, RolloutStatus, Task, Trajectory
from agent_loop.remote_agent_config import RemoteAgentConfig
from agent_loop.remote_agent_loop import RemoteAgentLoop
from agent_loop.trajectory import flatten
from agent_loop.trial.config import RecordingConfig, SamplingConfig
from proxy.app import build_app
from proxy.client import ProxyClient, ProxyClientError
from proxy.config import load_config
from proxy.errors import ConfigurationError
from proxy.extras.rules.rules import Rules
from proxy.http.server import app_runner
from proxy.machine import landlock
from proxy.machine.port import BACKLOG, http_url
from proxy.records import SessionKind

VERL_SAMPLING = ("temperature", "top_p", "top_k", "repetition_penalty")
"""Names of verl's sampling parameters that replace the agent's own."""


_SAME = (
    *("agent_name", "agent_import_path", "agent_kwargs", "agent_env", "environment_type"),
    *("environment_import_path", "environment_kwargs", "environment_overrides", "verifier_kwargs"),
    *("task_path_template", "upload_tasks", "use_local_trial"),
)
RECIPE_NAMES: Mapping[str, str] = {
    **{name: name for name in _SAME},
    "reward_key": "key",
    "harbor_server_url": "server_url",
    "harbor_server_timeout": "server_timeout_s",
    "harbor_dataset_dirs": "dataset_dirs",
    "task_roots": "dataset_dirs",
}
"""Key of verl's recipe → key of the section `harbor`."""


class VerlConfig(RemoteAgentConfig, RecordingConfig):
    """The section `remote_agent` of verl's configuration: the keys of the same section of this
    project's trainer, and the keys that the plug-in needs of its other sections. The key names of
    verl's recipe keep their meaning."""

    trials_dir: Path
    """Folder for the trials' directories and the proxy's store."""
    llm_proxy_ip: str | None = None
    """Address at which agents reach this machine; None: agents run on this machine."""
    rules: Rules = Field(default_factory=list)
    """Search rules of the recording proxy, which may end a trial or make its reward 0."""

    @model_validator(mode="before")
    @classmethod
    def _recipe_names(cls, values: Any) -> Any:
        """verl's recipe has the keys of Harbor's agents beside the others."""
        if not isinstance(values, Mapping):
            return values
        harbor = {RECIPE_NAMES[key]: value for key, value in values.items() if key in RECIPE_NAMES}
        others = {key: value for key, value in values.items() if key not in RECIPE_NAMES}
        if not harbor:
            return others
        return {**others, "harbor": {**others.get("harbor", {}), **harbor}}


class VerlSampling(SamplingConfig):
    """verl's sampling parameters; temperature 0 is allowed, because validation may be greedy. verl
    does not use what top-k left, nor do its servers report it."""

    temperature: float = Field(1.0, ge=0)
    top_p: float = 1.0
    top_k: int = -1
    repetition_penalty: float = 1.0

    @property
    def pinned(self) -> dict[str, float | int]:
        own = {"top_p": self.top_p, "top_k": self.top_k}
        pinned = {**super().pinned, **own, "repetition_penalty": self.repetition_penalty}
        return {name: value for name, value in pinned.items() if name != "alternatives"}


def _ports_of_ray() -> frozenset[int]:
    """Whoever reaches these can run programs on every node."""
    return RayHere.find().ports_here() if ray.is_initialized() else frozenset()


class Recorder:
    """One worker's proxy, the proxy's client, and the parts that the worker's trials share."""

    def __init__(self, config: VerlConfig, engine: VerlEngine, model: Path) -> None:
        self._config = config
        self._engine = engine
        self._model = model
        self._starting: asyncio.Task[ProxyClient] | None = None
        self._runner: web.AppRunner | None = None
        config.check_sandbox()
        self.launcher = config.build_launcher()
        self.rewards = config.build_rewards()

    async def proxy(self) -> ProxyClient:
        """The client of the proxy. The first call starts the proxy."""
        if self._starting is None:
            self._starting = asyncio.create_task(self._start())
        return await asyncio.shield(self._starting)

    async def close(self) -> None:
        """Ends the proxy and every call that is still running. verl does not call it, because it
        ends the worker's process."""
        if self._starting is not None:
            await (await self._starting).close()
        if self._runner is not None:
            await self._runner.cleanup()
        await self.launcher.close()
        await self.rewards.close()

    def loop(self, proxy: ProxyClient, sampling: VerlSampling) -> RemoteAgentLoop:
        config = self._config
        of_ray = RayHere.find().paths if ray.is_initialized() else ()
        return RemoteAgentLoop(
            proxy,
            self.launcher,
            self.rewards,
            config.trials_dir,
            trial=config,
            sampling=sampling,
            recording=config,
            hidden=(*config.private_files, *of_ray),
            shown=config.shown_files,
            private_ports=_ports_of_ray if landlock.missing() is None else frozenset,
        )

    async def _start(self) -> ProxyClient:
        address = self._config.llm_proxy_ip
        listener = socket.create_server(("127.0.0.1" if address is None else "0.0.0.0", 0))
        url = http_url(address or "127.0.0.1", listener.getsockname()[1])
        key = secrets.token_hex(16)
        self._config.trials_dir.mkdir(parents=True, exist_ok=True)
        config = load_config(
            model=self._model,
            host=listener.getsockname()[0],
            public_url=url,
            admin_key=key,
            store=f"sqlite:///{self._config.trials_dir.absolute()}/proxy-{os.getpid()}.db",
            max_context_tokens=self._engine.info.max_context_tokens,
            rules=self._config.rules,
        )
        self._runner = runner = app_runner(
            build_app(config, engines=[self._engine]), handler_cancellation=True
        )
        await runner.setup()
        await web.SockSite(runner, listener, backlog=BACKLOG).start()
        return ProxyClient(url, key)


@register("agentic")
class AgenticLoop(AgentLoopBase):  # type: ignore[misc]  # verl has no types
    """verl's agent loop of the name `agentic`: each of its runs is one trial of ours."""

    recorders: ClassVar[WeakKeyDictionary[Any, Recorder]] = WeakKeyDictionary()
    """verl's server client, one per worker → the worker's recorder. It is kept here because verl
    creates an agent loop for each sample."""

    def __init__(self, *arguments: Any, settings: Any = None, **named: Any) -> None:
        """Raises ConfigurationError: the settings cannot be used."""
        super().__init__(*arguments, **named)
        given = settings if settings is not None else self.config.get("remote_agent")
        if self.server_manager not in self.recorders:
            self.recorders[self.server_manager] = self._recorder(given)
        self._recorder_of_worker = self.recorders[self.server_manager]

    async def run(
        self, sampling_params: dict[str, Any], **row: Any
    ) -> AgentLoopOutput | list[AgentLoopOutput]:
        recorder = self._recorder_of_worker
        proxy = await recorder.proxy()
        pinned = {name: sampling_params[name] for name in VERL_SAMPLING}
        loop = recorder.loop(proxy, VerlSampling.model_validate(pinned))
        step = _plain(row.get("global_steps", 0))
        rollout = await loop.run(task_of(row), kind=SessionKind.TRAIN, version=max(0, step))
        await _delete(proxy, rollout.trial_id)
        several = "session_id" in row  # verl's v1 manager numbers a prompt's trials
        return self._all(rollout) if several else self._one(rollout)

    def _all(self, rollout: Rollout) -> list[AgentLoopOutput]:
        if not rollout.trainable:
            raise AgentLoopError(
                f"trial {rollout.trial_id} is {rollout.status.value} and cannot be trained: "
                f"{rollout.error or 'it has no reward, or only answers with a grammar'}"
            )
        return [_output(rollout, trajectory) for trajectory in flatten(rollout.segments)]

    def _one(self, rollout: Rollout) -> AgentLoopOutput:
        longest, most = self.rollout_config.response_length, self.rollout_config.prompt_length
        branches = flatten(rollout.segments) if rollout.trainable else []
        fitting = [b for b in branches if _first_trained(b) <= most]
        if not fitting:
            return self._nothing(rollout, len(branches))
        best = max(fitting, key=lambda branch: int(branch.mask.sum()))
        return _output(rollout, best, left_out=len(branches) - 1, longest=longest)

    def _nothing(self, rollout: Rollout, left_out: int) -> AgentLoopOutput:
        end = int(self.tokenizer.eos_token_id)
        array = np.array([end, end], np.int32)
        trains_nothing = Trajectory(
            ids=array,
            mask=np.array([False, False]),
            logprobs=np.zeros(2, np.float32),
            versions=np.full(2, -1, np.int32),
            turns=np.zeros(2, np.int32),
        )
        return _output(rollout, trains_nothing, left_out=left_out)

    def _recorder(self, given: Any) -> Recorder:
        container = (
            OmegaConf.to_container(given, resolve=True) if OmegaConf.is_config(given) else given
        )
        try:
            config = VerlConfig.model_validate(container or {})
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(["remote_agent", *map(str, first["loc"])])
            raise ConfigurationError(f"{key}: {first['msg']}") from error
        rollout = self.rollout_config
        engine = VerlEngine(
            self.server_manager,
            end_ids=_end_ids(self.tokenizer),
            max_context_tokens=rollout.prompt_length + rollout.response_length,
        )
        return Recorder(config, engine, Path(self.tokenizer.name_or_path))


async def _delete(proxy: ProxyClient, trial_id: str) -> None:
    """Deletes the trial's session. A trial that failed before it had one has none."""
    try:
        await proxy.delete(trial_id)
    except ProxyClientError as error:
        if error.status != 404:
            raise


def task_of(row: Mapping[str, Any]) -> Task:
    """The task in a row of verl's dataset. Its id is `instance_id`, `task_id` or `index`; its data
    are all columns that JSON can hold. If `prompt` is not a text (verl's own column of that name
    holds messages), the last user message takes its place."""
    data = {key: _plain(value) for key, value in row.items() if _is_plain(_plain(value))}
    extra = data.get("extra_info") or {}
    task_id = data.get("instance_id") or extra.get("task_id") or data.get("index", "task")
    said = [m.get("content") for m in data.get("raw_prompt", ()) if m.get("role") == "user"]
    if said and not isinstance(data.get("prompt"), str):
        data["prompt"] = said[-1]
    return Task(str(task_id), data, source=str(data.get("data_source", "verl")))


def _output(
    rollout: Rollout, branch: Trajectory, *, left_out: int = 0, longest: int | None = None
) -> AgentLoopOutput:
    if branch.images:
        raise AgentLoopError(
            f"trial {rollout.trial_id} has images, which verl's servers cannot see here; train "
            "with agentic-train and model.vision=frozen, or export the sessions (--format verl)"
        )
    start = _first_trained(branch)
    end = len(branch) if longest is None else min(len(branch), start + longest)
    mask, versions = branch.mask[start:end], branch.versions[start:end]
    sampled_by = versions[mask]
    times = rollout.times_s
    return AgentLoopOutput(
        prompt_ids=branch.ids[:start].tolist(),
        response_ids=branch.ids[start:end].tolist(),
        response_mask=mask.astype(int).tolist(),
        response_logprobs=branch.logprobs[start:end].tolist(),
        routed_experts=_experts(branch, end),
        reward_score=rollout.reward if rollout.trainable else 0.0,
        num_turns=rollout.num_turns,
        metrics={
            "generate_sequences": times.get("generate", 0.0),
            "tool_calls": max(0.0, times.get("agent", 0.0) - times.get("generate", 0.0)),
            "compute_score": times.get("verifier", 0.0),
        },
        extra_fields={
            "reward_extra_info": dict(rollout.reward_parts),
            "min_global_steps": int(sampled_by.min()) if len(sampled_by) else None,
            "max_global_steps": int(sampled_by.max()) if len(sampled_by) else None,
            "versions": versions.tolist(),
            "trial_id": rollout.trial_id,
            "trial_status": rollout.status.value,
            "trial_error": rollout.error,
            "trial_metrics": {**rollout.metrics, **{f"{k}_s": v for k, v in times.items()}},
            "forks": dict(rollout.forks),
            "truncated": rollout.status is RolloutStatus.TRUNCATED,
            "branches_left_out": left_out,
        },
    )


def _experts(branch: Trajectory, end: int) -> Any:
    """`[T - 1, L, K]`, the recorded experts up to the token before the last one; None if one of
    these tokens lacks them, because verl would replay expert 0 for it."""
    if branch.routing is None or not branch.routing.known[: end - 1].all():
        return None
    return branch.routing.experts[: end - 1].astype(np.int16)


def _first_trained(branch: Trajectory) -> int:
    """Index of the first token of the response; in a branch without trained tokens, the response is
    the last token."""
    return int(branch.mask.argmax()) if branch.mask.any() else len(branch) - 1


def _end_ids(tokenizer: Any) -> set[int]:
    """Ids of the tokens that end a text, or a turn in a chat template."""
    tokens = [tokenizer.eos_token, "<|im_end|>", "<|eot_id|>", "<|end|>", "<|endoftext|>"]
    vocabulary = tokenizer.get_vocab()
    return {vocabulary[token] for token in tokens if token in vocabulary}


def _plain(value: Any) -> Any:
    """The value, in which numpy's scalars and arrays are converted to Python's types."""
    return value.tolist() if isinstance(value, np.generic | np.ndarray) else value


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and _is_plain(item) for key, item in value.items())
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, str | int | float | bool)
