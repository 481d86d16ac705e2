"""`trainer.policies`: each policy has the run's own values for the keys that it leaves out.

What is not together with it is refused, such as `agent_loop.extras.swarm` and
`trainer.extras.sft`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from tests.trainer.test_fit import config_of
from trainer.config import TrainerConfig
from trainer.settings.sources import dump, load

LORA = {"rank": 8, "alpha": 4, "update": "adapter", "policy": "planner"}
POLICIES = {
    "planner": None,
    "coder": {"optimizer": {"lr": 2e-4}, "lora": {"rank": 2}},
    "judge": {"frozen": True},
}
AGENT = {"command": {"argv": ["true"]}, "policies": {"small": "coder", "judge": "judge"}}


def configured(**sections: Any) -> TrainerConfig:
    given = {"model": {"lora": LORA}, "remote_agent": AGENT, "trainer": {"policies": POLICIES}}
    for name, section in sections.items():
        given[name] = given.get(name, {}) | section
    return config_of(Path("model"), optimizer={"lr": 1e-3, "betas": [0.8, 0.9]}, **given)


def test_policy_has_the_keys_of_the_run_that_it_leaves_out() -> None:
    config = configured()
    planner, coder = config.of_policy("planner"), config.of_policy("coder")
    assert planner.model == config.model
    assert planner.optimizer == config.optimizer
    assert coder.optimizer == config.optimizer.model_copy(update={"lr": 2e-4})
    assert config.model.lora is not None
    assert coder.model.lora == config.model.lora.model_copy(update={"rank": 2, "policy": "coder"})
    assert coder.model.policy == "coder"
    assert config.trained_policies == ("planner", "coder")


def test_resolved_configuration_is_read_back_equal(tmp_path: Path) -> None:
    saved = tmp_path / "config.yaml"
    saved.write_text(dump(configured()))
    assert load([saved]) == configured()


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"model": {"lora": None}}, "set model.lora.update=adapter"),
        ({"model": {"lora": LORA | {"update": "merged"}}}, "set model.lora.update=adapter"),
        (
            {"model": {"lora": LORA | {"policy": "shop"}}},
            "model.lora.policy=shop: it is the policy of all model names that are not in "
            "remote_agent.policies; set it to one of planner, coder, judge",
        ),
        ({"remote_agent": {"policies": {"judge": "judge"}}}, "coder: no agent samples from it"),
        (
            {"trainer": {"policies": {"planner": {"lora": {"policy": "other"}}}}},
            "trainer.policies.planner.lora: `policy` and `update` are the run's own",
        ),
        ({"trainer": {"policies": {"planner": {"frozen": True}}}}, "all are frozen"),
        ({"trainer": {"policies": {"a@b": {}}}}, "trainer.policies.a@b.lora.policy"),
        ({"trainer": {"ranks": 2}}, "trainer.ranks=2: not supported with trainer.policies"),
        ({"cluster": {"backend": "ray"}}, "cluster.backend=ray: not supported"),
        ({"swarm": {}}, "swarm: not supported"),
        ({"sft": {"sessions": ["recorded"]}}, "sft: not supported"),
        ({"algorithm": {"preset": "ppo"}}, "algorithm.critic: not supported"),
    ],
)
def test_unsupported_settings_are_refused_by_name(sections: dict[str, Any], message: str) -> None:
    trainer = {"trainer": {"policies": POLICIES} | sections.pop("trainer", {})}
    with pytest.raises(ValidationError) as refused:
        configured(**trainer, **sections)
    assert message in str(refused.value)


def test_ranks_of_one_micro_batch_divide_all_ranks() -> None:
    settings = {"ranks": 4, "context_parallel": 2}
    assert config_of(Path("model"), trainer=settings).trainer.context_parallel == 2
    with pytest.raises(ValidationError) as refused:
        config_of(Path("model"), trainer={"ranks": 4, "context_parallel": 3})
    assert (
        "trainer.context_parallel=3 does not divide trainer.ranks=4; use 1 or 2 or 4, or 6 ranks"
        in str(refused.value)
    )


@pytest.mark.parametrize(
    ("trainer", "model", "message"),
    [
        (
            {"ranks": 3, "tensor_parallel": 2, "pipeline_parallel": 2},
            {},
            "trainer.tensor_parallel=2 · trainer.pipeline_parallel=2 does not divide "
            "trainer.ranks=3; use 4 ranks",
        ),
        (
            {"ranks": 4, "expert_parallel": 2, "tensor_parallel": 2},
            {},
            "trainer.expert_parallel: not supported with trainer.tensor_parallel; use",
        ),
        (
            {"ranks": 4, "context_parallel": 2, "tensor_parallel": 2},
            {},
            "trainer.context_parallel=2: not supported with trainer.tensor_parallel; remove",
        ),
        (
            {"ranks": 2, "tensor_parallel": 2},
            {"weights_dtype": "bfloat16", "compute_dtype": "bfloat16"},
            "model.weights_dtype=bfloat16: not supported with trainer.tensor_parallel",
        ),
        ({"ranks": 2, "tensor_parallel": 2}, {"lora": {}}, "model.lora: not supported with"),
        (
            {"ranks": 2, "expert_parallel": 2},
            {"router_replay": "replay"},
            "model.router_replay=replay: not supported with trainer.expert_parallel",
        ),
        (
            {"ranks": 2, "pipeline_parallel": 2},
            {"router_aux_loss": 0.1},
            "model.router_aux_loss=0.1: not supported with trainer.pipeline_parallel",
        ),
    ],
)
def test_settings_of_ranks_that_divide_the_model_are_refused_by_name(
    trainer: dict[str, Any], model: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValidationError) as refused:
        config_of(Path("model"), trainer=trainer, model=model)
    assert message in str(refused.value)


def test_critic_of_ranks_that_divide_the_model_is_refused() -> None:
    trainer = {"ranks": 2, "tensor_parallel": 2}
    with pytest.raises(ValidationError, match=r"algorithm.critic: not supported with trainer.tens"):
        config_of(Path("model"), trainer=trainer, algorithm={"preset": "ppo"})
