"""Which tokens a step trains: the same for every term of the loss and for every count."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from agent_loop.producers.rollout_config import RolloutConfig
from agent_loop.producers.staleness import fresh_part
from agent_loop.records import Group, Rollout, Task
from tests.trainer.algorithms.test_advantages import batch_of, trial
from tests.trainer.algorithms.test_turn_rewards import trial as trial_of_turns
from trainer.algorithms import Algorithm, AlgorithmConfig
from trainer.algorithms.correction import REJECTIONS
from trainer.algorithms.presets import PRESETS
from trainer.batch import Batch, trained_batch
from trainer.errors import TrainingError
from trainer.learning.policy_metrics import share_metrics
from trainer.learning.policy_parts import parts_of

TASK = Task("t", {})

VETO = {"name": "veto", "min_ratio": 0.5}
SPREAD = {"name": "divergence", "estimator": "abs", "scope": "token", "upper": 0.4}
BINARY = {"name": "binary_divergence", "upper": 0.4}
MOMENT = {"name": "second_moment", "threshold": 0.04}
REJECTS = (VETO, SPREAD, BINARY, MOMENT)
TERMS: dict[str, dict[str, Any]] = {
    "policy": {},
    "entropy": {"entropy_coefficient": 0.1},
    "kl": {"kl": {"coefficient": 0.1, "estimator": "k3", "where": "loss"}},
    "distillation": {"distillation": {"teacher": "t"}},
}


def two_groups() -> Batch:
    """A group with signal (rollouts a and b) and one without (c and d), three tokens each; the last
    token of a and of c is far from what was sampled."""
    batch = batch_of(
        [trial("a", 1.0, 1, tokens=3), trial("b", 0.0, 1, tokens=3)],
        [trial("c", 1.0, 1, tokens=3), trial("d", 1.0, 1, tokens=3)],
    )
    far = torch.zeros(12)
    far[[2, 8]] = -3.0
    batch.prox_logprobs = batch.logprobs + far
    batch.ref_logprobs = batch.teacher_logprobs = batch.logprobs - 0.3
    return batch


def gradient(batch: Batch, **settings: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of the loss by log-probabilities and entropies."""
    algorithm = Algorithm(AlgorithmConfig.model_validate(settings))
    algorithm.compute_advantages(batch)
    assert batch.prox_logprobs is not None
    logprobs = batch.prox_logprobs.clone().requires_grad_()
    entropy = torch.full((batch.num_tokens,), 2.0).requires_grad_()
    loss = algorithm.loss(batch)(logprobs, entropy, torch.arange(batch.num_tokens))
    loss.losses.sum().backward()
    zero = torch.zeros(batch.num_tokens)
    return tuple(zero if x.grad is None else x.grad for x in (logprobs, entropy))  # type: ignore[return-value]


@pytest.mark.parametrize("groups", ["all", "with_signal"])
@pytest.mark.parametrize("reject", REJECTS, ids=lambda part: part["name"])
@pytest.mark.parametrize("term", TERMS)
def test_rejected_token_is_trained_by_no_term(
    term: str, reject: dict[str, Any], groups: str
) -> None:
    batch = two_groups()
    by_logprob, by_entropy = gradient(
        batch, correction={"weight": None, "reject": [reject]}, groups=groups, **TERMS[term]
    )
    rejected = {"veto": [0, 1, 2, 6, 7, 8]}.get(reject["name"], [2, 8])
    outside = list(range(6, 12)) if groups == "with_signal" else []
    gone = torch.tensor(sorted({*rejected, *outside}))
    assert not by_logprob[gone].any()
    assert not by_entropy[gone].any()
    kept = [token for token in range(6) if token not in rejected]  # of the group with signal
    trained = by_entropy if term == "entropy" else by_logprob
    assert (trained[kept] != 0).all()


def test_no_rejection_is_left_out_of_the_test_above() -> None:
    assert {part["name"] for part in REJECTS} == set(REJECTIONS.names)


def test_threshold_of_m2po_is_of_the_tokens_that_are_trained() -> None:
    batch = two_groups()
    assert batch.prox_logprobs is not None
    batch.prox_logprobs[2] = batch.logprobs[2] - 0.3  # 0.09 / 6 > 0.01 > 0.09 / 12
    batch.prox_logprobs[8] = batch.logprobs[8]
    reject = {"correction": {"weight": None, "reject": [MOMENT | {"threshold": 0.01}]}}
    of_all, _ = gradient(batch, groups="all", **reject)
    of_signal, _ = gradient(batch, groups="with_signal", **reject)
    assert of_all[2] != 0
    assert of_signal[2] == 0


def test_gpg_makes_up_for_groups_without_signal_once() -> None:
    """Its gradient is the mean over the rollouts with signal, whichever groups are trained."""
    plain = {"aggregation": "rollout_mean", "correction": {"weight": None}}
    found: Any = [
        gradient(two_groups(), preset="gpg", groups=groups, **plain)[0][:6]
        for groups in ("all", "with_signal")
    ]
    assert found[0].tolist() == pytest.approx(found[1].tolist())
    assert found[0].abs().sum() == pytest.approx(0.5)  # |R − μ| = ½, once per rollout


def test_group_whose_rewards_are_equal_after_the_bounds_is_not_trained() -> None:
    batch = batch_of([trial("a", 3.0, 1), trial("b", 5.0, 1)])
    for high, count in ((4.0, 2), (3.0, 0)):
        config = {"groups": "with_signal", "reward": {"high": high}}
        algorithm = Algorithm(AlgorithmConfig.model_validate(config))
        assert len(algorithm.trained_sequences(batch)) == count


def test_rewards_of_turns_are_scaled_and_bounded_as_those_of_trials() -> None:
    def advantages(own: list[list[float]], **reward: Any) -> list[float]:
        batch = batch_of([trial_of_turns(str(n), each) for n, each in enumerate(own)])
        config = AlgorithmConfig.model_validate({"advantage": "dr_grpo", "reward": reward})
        Algorithm(config).compute_advantages(batch)
        assert batch.advantages is not None
        return batch.advantages.tolist()

    plain = advantages([[1.0, 0.0], [0.0, 3.0]])
    assert plain == [0.5, -1.5, -0.5, 1.5]
    assert advantages([[1.0, 0.0], [0.0, 3.0]], scale=2) == [2 * each for each in plain]
    assert advantages([[1.0, 0.0], [0.0, 3.0]], high=1) == [0.5, -0.5, -0.5, 0.5]
    assert advantages([[1.0, 0.0], [0.0, 3.0]], scale=0.5, high=1) == [0.25, -0.5, -0.25, 0.5]


@pytest.mark.parametrize("preset", sorted(PRESETS.keys() - {"ppo", "sft"}))
def test_presets_correct_as_their_papers_do_or_by_the_default(preset: str) -> None:
    weight = AlgorithmConfig.model_validate({"preset": preset}).correction.weight
    expected = {"m2po": None, "decoupled_ppo": "mask"}.get(preset, "truncate")
    assert (weight and weight.name) == expected


PARTS = {"pass_at_k": {"name": "pass_at_k", "k": 2}}
OVERLONG = {"reward": {"overlong": {"max_tokens": 8, "buffer_tokens": 4, "factor": 0.2}}}
COMPARING = (
    *("grpo", "dr_grpo", "rloo", "reinforce++", "reinforce++_baseline", "lite_ppo", "opo", "gpg"),
    *("pass_at_k", "tree", "accepted"),
)


@pytest.mark.parametrize("settings", [{}, OVERLONG], ids=["plain", "overlong"])
@pytest.mark.parametrize("name", COMPARING)
def test_advantages_do_not_depend_on_which_other_tokens_are_too_old(
    name: str, settings: dict[str, Any]
) -> None:
    """One rollout is too old as a whole, and of another the first turns are."""
    whole = [
        aged(trial("old", 1.0, 3, discount=0.5, posted={1: 0.5}, tokens=2), 0, 0, 0),
        aged(trial("half", 0.0, 3, discount=0.5, posted={0: 0.2, 2: 1.0}, tokens=2), 0, 0, 2),
        aged(trial("a", 0.0, 2, discount=0.5, posted={0: 0.7}, tokens=2), 2, 2),
        aged(trial("b", 0.75, 4, discount=0.5, tokens=1), 1, 1, 2, 2),
    ]
    config = RolloutConfig(max_staleness=1, stale="mask", group_size=4)
    fresh = fresh_part(Group("0", TASK, whole), 2, config)
    assert fresh is not None
    left, full = (advantages(list(group), name, **settings) for group in (fresh.rollouts, whole))
    assert {trial for trial, _ in left} == {"half", "a", "b"}
    assert len(full) - len(left) == 5  # turns
    assert left == {place: pytest.approx(full[place]) for place in left}
    assert any(any(values) for values in left.values())


def test_rollouts_that_are_too_old_weigh_nothing() -> None:
    """Gpg makes up for rollouts without signal among those that are trained only."""
    old, young = aged(trial("old", 1.0, 1), 0), [aged(trial(n, 0.0, 1), 2) for n in "ab"]
    config = RolloutConfig(max_staleness=1, stale="mask", group_size=3)
    fresh = fresh_part(Group("0", TASK, [old, *young]), 2, config)
    assert fresh is not None
    batch = trained_batch([fresh])
    assert (batch.num_rollouts, share_metrics(batch)) == (
        3,
        {"rollout/trials": 2, "reward/mean": 0},
    )
    by_logprob, _ = gradient(with_prox(batch), preset="gpg", aggregation="rollout_mean")
    assert by_logprob.tolist() == pytest.approx([1 / 12] * 4)


def test_whole_rollout_of_another_policy_that_is_too_old_stays_out_of_a_policys_baseline() -> None:
    old = replace(aged(trial("old", 1.0, 2), 0, 0), turn_policies={0: "planner", 1: "coder"})
    young = replace(aged(trial("new", 0.0, 2), 2, 2), turn_policies={0: "coder", 1: "coder"})
    config = RolloutConfig(max_staleness=1, stale="mask", group_size=2, min_group_size=1)
    fresh = fresh_part(Group("0", TASK, [old, young]), 2, config)
    assert fresh is not None
    parts = {name: parts_of([fresh], name)[0].rollouts for name in ("planner", "coder")}
    assert [rollout.compared for rollout in parts["planner"]] == [True, False]
    assert [rollout.stale_turns for rollout in parts["coder"]] == [{1: 2}, {}]


def aged(rollout: Rollout, *versions: int) -> Rollout:
    """The rollout, whose turns were sampled by these versions."""
    by_turn = np.array(versions, np.int32)
    return replace(
        rollout,
        segments=tuple(
            replace(each, versions=np.where(each.mask, by_turn[each.turns], np.int32(-1)))
            for each in rollout.segments
        ),
    )


def advantages(
    group: list[Rollout], name: str, **settings: Any
) -> dict[tuple[str, int], list[float]]:
    """Trial and turn → the advantages of its tokens."""
    batch = trained_batch([Group("0", TASK, group)])
    Algorithm(
        AlgorithmConfig.model_validate({"advantage": PARTS.get(name, name), **settings})
    ).compute_advantages(batch)
    assert batch.advantages is not None
    found: dict[tuple[str, int], list[float]] = {}
    columns = (batch.rollout.tolist(), batch.turns.tolist(), batch.advantages.tolist())
    for rollout, turn, value in zip(*columns, strict=True):
        found.setdefault((batch.trial_ids[rollout], turn), []).append(value)
    return found


def with_prox(batch: Batch) -> Batch:
    return replace(batch, prox_logprobs=batch.logprobs)


def test_token_that_no_version_sampled_is_refused() -> None:
    """It would count as older than every other, and so be compared with nothing."""
    known, unknown = aged(trial("a", 1.0, 1), 2), aged(trial("b", 0.0, 1), -1)
    with pytest.raises(TrainingError, match=r"rollout b, turn 0: .* that no version"):
        trained_batch([Group("0", TASK, [known, unknown])])


def test_trial_that_stands_twice_in_a_batch_is_refused() -> None:
    once, another = aged(trial("a", 1.0, 1), 2), aged(trial("b", 0.0, 1), 2)
    groups = [Group("0", TASK, [once, another]), Group("1", TASK, [another])]
    with pytest.raises(TrainingError, match="rollout b stands 2 times"):
        trained_batch(groups)
