"""The names that keys have in other trainers, and their names here.

The error for another trainer's key names the key to use here, so that the error messages are
enough to translate a configuration of verl, AReaL or AgentJet.
"""

from __future__ import annotations

from collections.abc import Mapping

SUCCESSORS: Mapping[str, str] = {
    "actor.path": "model.path",
    "actor.optimizer.lr": "optimizer.lr",
    "actor_rollout_ref.actor.clip_ratio": "algorithm.loss.clip_low and algorithm.loss.clip_high",
    "actor_rollout_ref.actor.optim.lr": "optimizer.lr",
    "actor_rollout_ref.model.path": "model.path",
    "actor_rollout_ref.rollout.n": "rollout.group_size",
    "actor_rollout_ref.rollout.temperature": "rollout.temperature",
    "actor_rollout_ref.rollout.top_k": "rollout.top_k",
    "actor_rollout_ref.rollout.top_p": "rollout.top_p",
    "ajet.model.path": "model.path",
    "algorithm.gamma": "algorithm.advantage.gamma",
    "algorithm.kl_ctrl.kl_coef": "algorithm.kl.coefficient",
    "algorithm.lam": "algorithm.advantage.lam",
    "gconfig.temperature": "rollout.temperature",
    "remote_agent.harbor_dataset_dirs": "data.harbor_dataset_dirs",
    "remote_agent.llm_proxy_ip": "proxy_server.llm_proxy_ip",
    "remote_agent.placement": "remote_agent.command, remote_agent.kubernetes, remote_agent.ray or "
    "remote_agent.harbor_server_urls",
    "remote_agent.proxy_server_url": "proxy_server.url",
    "rollout.n": "rollout.group_size",
    "train_dataset.batch_size": "rollout.groups_per_step",
    "train_dataset.path": "data.train_files",
    "trainer.default_local_dir": "trainer.run_dir",
    "trainer.dir": "trainer.run_dir",
    "trainer.project_name": "logging.wandb_project",
    "valid_dataset.path": "data.val_files",
}
"""A whole key elsewhere → the key here."""

SUCCESSORS_BY_LAST_NAME: Mapping[str, str] = {
    "adv_estimator": "algorithm.advantage.name",
    "clip_ratio_high": "algorithm.loss.clip_high",
    "clip_ratio_low": "algorithm.loss.clip_low",
    "gpu_memory_utilization": "engine.gpu_memory_share",
    "grpo_n": "rollout.group_size",
    "interchange_server_port": "the port of --swarm-server HOST:PORT",
    "kl_loss_coef": "algorithm.kl.coefficient",
    "loss_agg_mode": "algorithm.aggregation",
    "max_concurrent_rollouts": "rollout.concurrency",
    "max_env_worker": "rollout.concurrency",
    "max_head_offpolicyness": "rollout.max_staleness",
    "max_model_len": "engine.max_context_tokens",
    "max_new_tokens": "rollout.max_tokens",
    "max_response_length": "rollout.max_tokens",
    "max_token_staleness": "rollout.max_staleness and rollout.stale",
    "n_gpus_per_node": "trainer.ranks and engine.replicas",
    "n_samples": "rollout.group_size",
    "num_repeat": "rollout.group_size",
    "over_sample_threshold": "rollout.over_sample, the share of additional groups",
    "ppo_epochs": "algorithm.epochs",
    "ppo_mini_batch_size": "algorithm.mini_batches, the number of mini-batches of a step",
    "save_freq": "trainer.save_every",
    "swarm_mode_sample_collection_max_cached_episodes": "swarm.max_collected",
    "swarm_mode_sample_collection_method": "swarm.stop_rule",
    "tail_batch_trigger_size": "rollout.tail_groups",
    "test_freq": "eval.every",
    "tool_format": "proxy_server.renderer",
    "total_epochs": "trainer.steps",
    "total_train_epochs": "trainer.steps",
    "total_training_steps": "trainer.steps",
    "train_batch_size": "rollout.groups_per_step",
}
"""The last part of another trainer's key, whatever its section there → the key here."""


def successor(key: str) -> str | None:
    """The name here of another trainer's key; None if it is not known."""
    return SUCCESSORS.get(key) or SUCCESSORS_BY_LAST_NAME.get(key.rpartition(".")[2])
