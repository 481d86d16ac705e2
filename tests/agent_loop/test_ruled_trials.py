"""A trial whose session matches a search rule of the proxy: its reward and its end."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from agent_loop.records import AgentEnd, AgentResult, Graded, RolloutStatus, Task
from agent_loop.trial.outcome import Attempt, build_rollout
from agent_loop.trial.salvage import SalvageConfig
from proxy.extras.rules.rules import RuleConfig, RuleQuery
from proxy.records import Mark, Reward, RuleAction
from tests.agent_loop.recorded import turn
from tests.agent_loop.test_remote_agent_loop import run
from tests.proxy.conftest import StartProxy, checkpoint, rendering, start_proxy  # noqa: F401


def rule(action: RuleAction) -> RuleConfig:
    return RuleConfig(
        name="greets", query=RuleQuery(text="hello", answers_only=True), action=action
    )


async def test_reward_of_a_verifier_becomes_zero_with_the_cause(
    start_proxy: StartProxy,  # noqa: F811
    tmp_path: Path,
) -> None:
    proxy = await start_proxy(rules=[rule(RuleAction.ZERO_REWARD)])
    rollout = await run(proxy, tmp_path / "trials", task={"turns": 3})
    assert (rollout.status, rollout.reward) == (RolloutStatus.DONE, 0.0)
    assert rollout.reward_parts["before_rules"] == 1.0
    assert rollout.reward_parts["rule/greets"] == 1.0
    assert rollout.trainable


async def test_trial_that_a_rule_ends_is_truncated_and_not_repeated(
    start_proxy: StartProxy,  # noqa: F811
    tmp_path: Path,
) -> None:
    proxy = await start_proxy(rules=[rule(RuleAction.END)])
    rollout = await run(
        *(proxy, tmp_path / "trials"),
        verifier="import sys; sys.exit(1)",
        task={"turns": 100_000},
        max_retries=2,
        salvage=SalvageConfig(),
    )
    assert (rollout.status, rollout.error) == (
        RolloutStatus.TRUNCATED,
        "search rule greets ended the trial at turn 0",
    )
    assert rollout.reward == 0.0
    assert len(await proxy.control.list_sessions()) == 1


def test_rewards_of_turns_are_zero_too() -> None:
    attempt, agent = Attempt("b", Task("t", {})), AgentResult(AgentEnd.EXITED)
    turns = [turn(0, None, 0, [1], [2]), turn(1, 0, 2, [3], [4])]
    posted = [Reward("a", 0.5, turn=1)]
    mark = Mark("r", RuleAction.ZERO_REWARD, 0, 1.0)
    for graded in (Graded(None), Graded(1.0)):
        rollout = build_rollout(attempt, agent, turns, graded, posted=posted, marks=[mark])
        assert rollout.reward == 0.0
        assert set((rollout.turn_returns or {}).values()) <= {0.0}
    kept = build_rollout(
        *(attempt, agent, turns, Graded(1.0)),
        posted=posted,
        marks=[replace(mark, action=RuleAction.MARK)],
    )
    assert kept.reward == 1.0
    assert "rule/r" not in kept.reward_parts
