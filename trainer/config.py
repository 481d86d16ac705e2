"""The configuration of a training run: its sections, and the checks across sections.

Each section is the model that the code using it takes, and is documented where it is defined.
`trainer.settings.sources.load` builds the configuration from YAML files, the environment and the
command line. Unknown keys are refused, and ranges are checked before anything starts.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Annotated, Self

from pydantic import Field, model_validator

from agent_loop.agents import OneOfAgents
from agent_loop.evaluator import EvalConfig
from agent_loop.producers.rollout_config import RolloutConfig
from agent_loop.remote_agent_config import RemoteAgentConfig
from agent_loop.tasks import DataConfig
from proxy.engines.address import EngineAddress
from proxy.engines.vllm_server import VllmConfig
from proxy.http.web_guard import EVERYWHERE
from proxy.records.alternatives import MAX_ALTERNATIVES
from proxy.settings.late_section import LateSection
from proxy.settings.section import Section
from trainer.algorithms.probe import broken_parts, settings_without_effect
from trainer.cluster.config import ProcessesConfig
from trainer.engine import GPUS_OF_AN_ENGINE
from trainer.optimizer_config import OptimizerConfig
from trainer.run.log import LoggingConfig
from trainer.schedules import (
    CRITIC,
    TRIAL_STEPS,
    longer_than_the_run,
    rates_that_never_fall,
    without_effect,
)


class TrainerConfig(ProcessesConfig):
    """Example: TrainerConfig.model_validate({"model": {"path": …}, "remote_agent": {…}})"""

    data: DataConfig = DataConfig()
    remote_agent: RemoteAgentConfig = RemoteAgentConfig()
    agents: Mapping[str, OneOfAgents] = Field(default_factory=dict)
    """Several agents by name, in place of `remote_agent`: each has the keys of `remote_agent`, its
    `weight`, and optionally its own `data`."""
    swarm: Annotated[Section | None, LateSection("agent_loop.extras.swarm.config:SwarmConfig")] = (
        None
    )
    """If set, clients bring the tasks and run the agents (`agentic-train --swarm-server`)."""
    sft: Annotated[Section | None, LateSection("trainer.extras.sft.config:SftConfig")] = None
    """If set, the run is supervised fine-tuning on recorded sessions (`agentic-train sft`). It uses
    the sections `model`, `optimizer`, `trainer`, `cluster` and `logging`, and the renderer of
    `proxy_server`; it may also have those of the agent's own training, which then have no effect.
    """
    eval: EvalConfig = EvalConfig()
    logging: LoggingConfig = LoggingConfig()

    @property
    def agent_sections(self) -> Mapping[str, RemoteAgentConfig]:
        """The agents by name; a single one has the name ""."""
        return self.agents or {"": self.remote_agent}

    @property
    def served_judges(self) -> Mapping[str, VllmConfig]:
        if self.sft is not None:
            return {}
        return {
            f"agents.{name}.judge" if name else "remote_agent.judge": engine
            for name, section in self.agent_sections.items()
            if section.judge is not None and isinstance(engine := section.judge.served, VllmConfig)
        }

    @model_validator(mode="after")
    def _sections_fit(self) -> Self:
        """Refuses settings that contradict each other, all of them at once: one line each."""
        checks = (
            self._some_agent(),
            self._swarm_batches(),
            self._engines_are_the_proxys(),
            self._engines_have_addresses(),
            self._some_engine(),
            self._joining_engines_can_join(),
            self._one_device_each(),
            self._groups_of_ranks_are_whole(),
            self._optimizers_have_the_weights_type(),
            self._divided_models_are_supported(),
            self._images_are_supported(),
            self._weights_can_travel(),
            self._sleepers_are_idle(),
            self._pairs_share(),
            self._engines_use_their_gpus(),
            self._engines_span_nodes(),
            self._pods_reach_the_proxy(),
            self._groups_have_a_baseline(),
            self._what_is_left_is_recorded(),
            self._teacher_teaches(),
            self._steps_train(),
            self._schedules_agree(),
            self._clocks_decide_nothing(),
            self._policies_are_adapters(),
            self._policies_are_sampled(),
        )
        if problems := list(itertools.chain(*checks)):
            raise ValueError("\n".join(problems))
        return self

    @property
    def sampled(self) -> RolloutConfig:
        """The section `rollout`, which also records the experts that the trainer replays, and has
        the seeds of a deterministic run."""
        records = self.rollout.routed_experts or self.model.router_replay == "replay"
        seeded = self.rollout.seeded or self.trainer.deterministic
        return self.rollout.model_copy(update={"routed_experts": records, "seeded": seeded})

    def _joining_engines_can_join(self) -> Iterator[str]:
        if self.relay is not None:
            yield from self.relay.problems(self.cluster.backend, self.proxy_server)

    def _some_agent(self) -> Iterator[str]:
        if self.sft is not None:
            if self.swarm is not None:
                yield "sft: fine-tuning has no clients; remove the section swarm or sft"
        elif self.agents:
            yield from self._only_agents()
        elif self.swarm is None and not self.remote_agent.agents:
            yield (
                "no agent: set remote_agent.command.argv to the program that starts it, or one of "
                "remote_agent.python, http, harbor, kubernetes, ray"
            )

    def _only_agents(self) -> Iterator[str]:
        if self.swarm is not None:
            yield "agents: a swarm's clients run the agents; use remote_agent for its evaluation"
        if self.remote_agent != RemoteAgentConfig():
            yield "remote_agent: the run has `agents`; move the keys of remote_agent to agents.NAME"
        for name, agent in self.agents.items():
            if not name or "/" in name:
                yield f"agents.{name!r}: a name has at least one character and no /"
            if not agent.agents:
                yield f"agents.{name}: no agent: set command.argv, or one of python, http, …"

    def _swarm_batches(self) -> Iterator[str]:
        for name in ("filter", "producer"):
            if self.swarm is not None and getattr(self.rollout, name) is not None:
                yield f"rollout.{name}: a swarm's clients choose the episodes; remove the key"

    def _engines_are_the_proxys(self) -> Iterator[str]:
        engine = self.engine
        pulled = engine.publish is not None and engine.replicas == 0
        if self.proxy_server.url is not None and not (engine.urls or pulled):
            yield (
                f"proxy_server.url={self.proxy_server.url}: a running proxy samples from "
                "its own engines; list them in engine.urls, so that they receive the weights, or "
                "set engine.replicas=0 and engine.publish, from which its relay workers pull them"
            )
        if engine.publish and self.trainer.policies:
            yield (
                "trainer.policies: relay workers pull one policy (engine.publish); remove "
                "trainer.policies, or engine.publish"
            )

    def _engines_have_addresses(self) -> Iterator[str]:
        for url in self.engine.urls:
            try:
                EngineAddress.parse(url)
            except ValueError as error:
                yield f"engine.urls: {error}"

    def _some_engine(self) -> Iterator[str]:
        running = self.proxy_server.url is not None  # whose engines may be relay workers
        sampled = self.engine.replicas or self.engine.urls or self.relay_workers or running
        if self.sft is None and not sampled:
            yield "engine.replicas=0: no engine; set it to 1 or more, or set relay.workers"

    def _one_device_each(self) -> Iterator[str]:
        if self.trainer.ranks > 1 and ":" in self.trainer.device:
            yield (
                f"trainer.device={self.trainer.device!r} is one device, and trainer.ranks="
                f"{self.trainer.ranks} want one each; use cuda, cpu or auto"
            )

    def _groups_of_ranks_are_whole(self) -> Iterator[str]:
        ranks, keys = self.trainer.ranks, self._parallel_keys()
        needed = math.prod(keys.values())
        if ranks % needed:
            named = " · ".join(f"{key}={size}" for key, size in keys.items())
            fitting = [str(each) for each in range(1, ranks + 1) if ranks % each == 0]
            smaller = f"{' or '.join(fitting)}, or " if len(keys) == 1 else ""
            yield (
                f"{named} does not divide trainer.ranks={ranks}; use {smaller}"
                f"{-(-ranks // needed) * needed} ranks"
            )
        if ranks % (copies := self.trainer.weight_copies):
            yield (
                f"trainer.weight_copies={copies} does not divide trainer.ranks={ranks}; each copy "
                "is sharded over the same number of ranks"
            )

    def _optimizers_have_the_weights_type(self) -> Iterator[str]:
        weights = self.model.weights_dtype
        for key, each in self._optimizers.items():
            if each.name == "adamw_8bit" and (each.offload or weights != "float32"):
                cause = f"{key}.offload" if each.offload else f"model.weights_dtype={weights}"
                yield f"{cause}: not supported with {key}.name=adamw_8bit; use adamw"
            if each.name == "adamw_8bit" and self.trainer.ranks > 1:
                yield (  # bitsandbytes does not update a sharded weight
                    f"{key}.name=adamw_8bit: not supported with trainer.ranks="
                    f"{self.trainer.ranks}; use adamw, whose moments are divided among the ranks"
                )

    def _divided_models_are_supported(self) -> Iterator[str]:
        if not self.trainer.parallelism.divides_model:
            return
        model, keys = self.model, self._parallel_keys()
        context = keys.pop("trainer.context_parallel", 1)
        unsupported = {
            f"trainer.context_parallel={context}": context > 1,
            f"trainer.weight_copies={self.trainer.weight_copies}": self.trainer.weight_copies > 1,
            "model.lora": model.lora is not None,
            f"model.vision={model.vision}": model.vision != "text",
            f"model.router_replay={model.router_replay}": model.router_replay != "off",
            f"model.router_aux_loss={model.router_aux_loss}": model.router_aux_loss > 0,
            "algorithm.critic": self.algorithm.critic is not None,
            f"model.weights_dtype={model.weights_dtype}": model.weights_dtype != "float32",
            "model.activation_offload": model.activation_offload,
            "optimizer.offload": self.optimizer.offload,
        }
        for key in (key for key, is_set in unsupported.items() if is_set):
            yield f"{key}: not supported with {', '.join(keys)}; remove one of them"
        if self.trainer.expert_parallel > 1 and self.trainer.tensor_parallel > 1:
            yield (
                "trainer.expert_parallel: not supported with trainer.tensor_parallel; use "
                "trainer.pipeline_parallel to hold fewer layers on a rank"
            )

    def _images_are_supported(self) -> Iterator[str]:
        model, teacher = self.model, self.algorithm.distillation
        if model.vision != "text" and teacher is not None and teacher.engine_url is not None:
            yield (
                f"model.vision={model.vision}: not supported with algorithm.distillation.teacher "
                "(an engine); remove one of them"
            )

    def _parallel_keys(self) -> dict[str, int]:
        """The keys by which ranks divide a micro-batch, as far as they are set."""
        trainer = self.trainer
        sizes = {
            "trainer.context_parallel": trainer.context_parallel,
            "trainer.tensor_parallel": trainer.tensor_parallel,
            "trainer.pipeline_parallel": trainer.pipeline_parallel,
            "trainer.expert_parallel": trainer.expert_parallel,
        }
        return {key: size for key, size in sizes.items() if size > 1}

    def _weights_can_travel(self) -> Iterator[str]:
        cluster, transfer = self.cluster, self.engine.weight_transfer
        sent = self.engine.replicas or self.engine.urls
        split = cluster.backend == "ray" and cluster.strategy != "STRICT_PACK"
        if sent and split and transfer == "shm":
            yield (
                f"cluster.strategy={cluster.strategy}: engine.weight_transfer=shm is for one node; "
                "use STRICT_PACK, nccl or gloo"
            )

    def _sleepers_are_idle(self) -> Iterator[str]:
        if self.engine.sleep and self.trainer.mode == "separate":
            yield (
                "engine.sleep: engines sample while a `separate` trainer trains; use "
                "trainer.mode=colocated"
            )

    def _pairs_share(self) -> Iterator[str]:
        ranks, replicas, gpus = self.trainer.ranks, self.engine.replicas, self.cluster.engine_gpus
        if self.sft is not None or not self.cluster.share_gpus:
            return
        if self.engine.gpu_memory_share is None:
            yield (
                "cluster.share_gpus: vLLM takes 0.92 of a GPU, which leaves no memory for the rank "
                "there; set engine.gpu_memory_share to the engine's part, such as 0.4"
            )
        if ranks != replicas or gpus not in (None, 1):
            yield (
                f"cluster.share_gpus: trainer.ranks={ranks} and engine.replicas={replicas} must be "
                f"equal, and cluster.engine_gpus={gpus} must be unset or 1"
            )

    def _engines_use_their_gpus(self) -> Iterator[str]:
        cluster, size = self.cluster, self.engine.tensor_parallel
        if cluster.backend == "ray":
            if (cluster.engine_gpus or size) != size:
                yield (
                    f"cluster.engine_gpus={cluster.engine_gpus}: an engine uses {size} "
                    f"({GPUS_OF_AN_ENGINE} in engine.args); leave cluster.engine_gpus out, or make "
                    "them equal"
                )
            if cluster.share_gpus and size > 1:
                yield f"cluster.share_gpus: an engine uses {size} GPUs, and a rank 1; remove it"
        elif cluster.address is not None:
            yield (
                f"cluster.address={cluster.address}: the run would not use that Ray cluster; set "
                "cluster.backend=ray, or remote_agent.ray.address for the agents alone"
            )

    def _engines_span_nodes(self) -> Iterator[str]:
        cluster, engine = self.cluster, self.engine
        if (nodes := cluster.engine_nodes) == 1:
            return
        key, size = f"cluster.engine_nodes={nodes}", engine.tensor_parallel
        if cluster.backend != "ray":
            yield f"{key}: a run without Ray starts engines on its own machine; set backend=ray"
        if size % nodes:
            yield f"{key} does not divide the {size} workers of {GPUS_OF_AN_ENGINE} in engine.args"
        if cluster.strategy == "STRICT_PACK":
            yield (
                f"{key}: cluster.strategy=STRICT_PACK places everything on one node; use PACK, "
                "SPREAD or STRICT_SPREAD"
            )

    def _pods_reach_the_proxy(self) -> Iterator[str]:
        server = self.proxy_server
        listens_here = server.host == "localhost" or server.host.startswith(("127.", "::1"))
        if server.url or server.llm_proxy_ip or not (listens_here or server.host in EVERYWHERE):
            return
        for name, agent in self.agent_sections.items():
            if agent.kubernetes is not None:
                key = f"agents.{name}" if name else "remote_agent"
                yield (
                    f"{key}.kubernetes: pods cannot reach the proxy at proxy_server.host="
                    f"{server.host}; set proxy_server.host=0.0.0.0 and proxy_server.llm_proxy_ip "
                    "to an address or a Service by which they reach it (docs/placement.md)"
                )

    def _groups_have_a_baseline(self) -> Iterator[str]:
        advantage = self.algorithm.advantage
        own = self.rollout.producer is not None  # which may add rollouts that branch from others
        if self.rollout.group_size == 1 and not own and advantage.compares_within_group:
            yield (
                f"rollout.group_size=1: algorithm.advantage.name={advantage.name} compares the "
                "rollouts of a group, so a group of one trains nothing; use rollout.group_size=2 "
                "or more, or algorithm.advantage.name=reinforce++ or gae"
            )

    def _what_is_left_is_recorded(self) -> Iterator[str]:
        rollout = self.rollout
        if rollout.top_p < 1 and not rollout.top_k:
            yield (
                f"rollout.top_p={rollout.top_p:g}: the trainer needs the tokens that are left, of "
                f"which at most {MAX_ALTERNATIVES} are recorded; set rollout.top_k, to at most that"
            )

    def _teacher_teaches(self) -> Iterator[str]:
        distillation, temperature = self.algorithm.distillation, self.rollout.temperature
        if distillation is None and self.algorithm.advantage.name == "none":
            yield (
                "algorithm.advantage.name=none: nothing is learnt from rewards; set "
                "algorithm.distillation.teacher, or another advantage"
            )
        if distillation is not None and distillation.engine_url is not None and temperature != 1:
            yield (
                f"rollout.temperature={temperature}: algorithm.distillation.teacher="
                f"{distillation.teacher} scores given tokens at temperature 1; use 1, or the "
                "folder of a checkpoint as teacher"
            )
        if distillation is not None and distillation.engine_url and self.rollout.top_k:
            yield (
                f"rollout.top_k={self.rollout.top_k}: algorithm.distillation.teacher="
                f"{distillation.teacher} scores tokens among the whole vocabulary; use 0, or the "
                "folder of a checkpoint as teacher"
            )

    def _steps_train(self) -> Iterator[str]:
        """What a step on an invented batch shows, where the rollouts of a batch are known."""
        rollout = self.rollout
        known = self.sft is None and self.swarm is None and rollout.producer is None
        compares = rollout.group_size > 1 or not self.algorithm.advantage.compares_within_group
        if known and compares:
            yield from settings_without_effect(self.algorithm, rollout.group_size)
        if self.sft is None:
            yield from broken_parts(self.algorithm, rollout.group_size)
        if rollout.min_group_size > rollout.group_size and rollout.producer is None:
            yield (
                f"rollout.min_group_size={rollout.min_group_size} is above rollout.group_size="
                f"{rollout.group_size}: every group would be replaced; lower it"
            )

    def _clocks_decide_nothing(self) -> Iterator[str]:
        if self.trainer.deterministic and self.rollout.straggler_factor is not None:
            yield (
                f"rollout.straggler_factor={self.rollout.straggler_factor}: a clock would decide "
                "which trials are trained; remove it, or trainer.deterministic"
            )

    @property
    def warnings(self) -> tuple[str, ...]:
        """What is allowed, and is most often a mistake: schedules longer than the short trial of a
        run."""
        is_trial = self.sft is None and self.trainer.steps <= TRIAL_STEPS
        return tuple(self._schedules_beyond()) if is_trial else ()

    def _schedules_agree(self) -> Iterator[str]:
        if self.sft is not None:  # which knows its number of steps when its sessions are read
            yield from rates_that_never_fall({"optimizer": self.optimizer})
            return
        yield from rates_that_never_fall(self._optimizers)
        yield from without_effect(self.algorithm, self.rollout, self.trainer, self.eval)
        if self.trainer.steps > TRIAL_STEPS:
            yield from self._schedules_beyond()

    def _schedules_beyond(self) -> Iterator[str]:
        yield from longer_than_the_run(self.algorithm, self._optimizers, self.trainer, self.eval)

    @property
    def _optimizers(self) -> Mapping[str, OptimizerConfig]:
        """The optimizers of the run by their keys; one that policies have in common once."""
        critic, policies = self.algorithm.critic, self.trainer.policies
        optimizers = {"optimizer": self.optimizer}
        if critic is not None:
            optimizers[CRITIC] = critic.optimizer
        for name, section in policies.items():
            if not section.frozen and section.optimizer != self.optimizer:
                optimizers[f"trainer.policies.{name}.optimizer"] = section.optimizer
        return optimizers

    def _policies_are_adapters(self) -> Iterator[str]:
        lora, policies = self.model.lora, self.trainer.policies
        if not policies:
            return
        if lora is None or lora.update != "adapter":
            yield (
                "trainer.policies: engines serve several policies as adapters; set "
                "model.lora.update=adapter"
            )
        elif lora.policy not in policies:
            yield (
                f"model.lora.policy={lora.policy}: it is the policy of all model names that are "
                f"not in remote_agent.policies; set it to one of {', '.join(policies)}"
            )
        if not self.trained_policies:
            yield "trainer.policies: all are frozen; remove `frozen` from one of them"
        for name, section in policies.items():
            if section.lora.policy != name or (lora and section.lora.update != lora.update):
                yield f"trainer.policies.{name}.lora: `policy` and `update` are the run's own"
        alone = {
            "sft": self.sft is not None,
            "swarm": self.swarm is not None,
            "cluster.backend=ray": self.cluster.backend == "ray",
            f"trainer.ranks={self.trainer.ranks}": self.trainer.ranks > 1,
            "algorithm.critic": self.algorithm.critic is not None,
            "algorithm.distillation": self.algorithm.distillation is not None,
            "algorithm.kl.reference": bool(self.algorithm.kl and self.algorithm.kl.reference),
        }
        for key in (key for key, is_set in alone.items() if is_set):
            yield f"{key}: not supported with trainer.policies; remove one of them"

    def _policies_are_sampled(self) -> Iterator[str]:
        sampled = {name for each in self.agent_sections.values() for name in each.policies.values()}
        for name in self.trainer.policies.keys() - sampled - {self.model.policy}:
            yield (
                f"trainer.policies.{name}: no agent samples from it; map a model name to it in "
                "remote_agent.policies, or remove it"
            )
