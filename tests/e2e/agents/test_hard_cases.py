"""What real agents do that breaks linear recorders: sub-agents, compaction, cut and retried calls.

Each sampled token of an answer that the agent used is trained once. Answers that were cut or
requested again are marked as such.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from agent_loop.launchers.command import CommandConfig
from agent_loop.records import Rollout, RolloutStatus
from agent_loop.trajectory import flatten
from agent_loop.trial.credit import CreditConfig, assign_credit, summaries
from proxy.records import TurnStatus
from proxy.testing.scripted_engine import Fault, text_script
from tests.e2e.agents.model import DONE, call, play
from tests.e2e.agents.test_agents import example, pytestmark, trial
from tests.proxy.conftest import RunningProxy, StartProxy

__all__ = ["pytestmark"]


def without(command: CommandConfig, argument: str) -> CommandConfig:
    return command.model_copy(
        update={"argv": tuple(part for part in command.argv if part != argument)}
    )


def plays(proxy: RunningProxy, script: Any) -> None:
    tokenizer = proxy.rendering.tokenizer
    proxy.engine.script = text_script(
        script,
        decode=tokenizer.decode,
        encode=tokenizer.encode,
        end_ids=[tokenizer.convert_tokens_to_ids("<|im_end|>")],
    )


def assert_trained_once(rollout: Rollout, proxy: RunningProxy) -> None:
    """Checks that every completed answer, and no other, is at exactly one place of the rollout."""
    answers = [call for call in proxy.engine.calls if call.finish_reason is not None]
    assert rollout.sampled_tokens <= sum(len(call.answer_ids) for call in answers)
    paths = flatten(rollout.segments)
    assert sum(int(path.mask.sum()) for path in paths) == rollout.sampled_tokens


def shell(command: str) -> str:
    return call("Bash", {"command": command, "description": "Runs the step"})


HAND_OUT = "Hand out the parts."


def hands_out(prompt: str, work: str = "echo {part} >> parts.txt") -> str:
    """The main agent starts two sub-agents at once; each runs `work`."""
    results = prompt.count("<tool_response>\n")
    for part in ("ONE", "TWO"):
        if f"Sub-task {part}" in prompt and "Hand out" not in prompt:
            return DONE if results else shell(work.format(part=part))
    if results == 0:
        return "I hand it out.\n" + "\n".join(
            call(
                "Agent",
                {
                    "description": f"part {part}",
                    "prompt": f"Sub-task {part}: write it down.",
                    "subagent_type": "general-purpose",
                    "run_in_background": False,
                },
            )
            for part in ("ONE", "TWO")
        )
    return shell("echo hi > out.txt") if results == 2 else DONE


def summarises(prompt: str) -> str:
    """A history that becomes too long, its summary, and the end of the task after it."""
    if "summary of the conversation" in prompt.rsplit("<|im_start|>user", 1)[-1]:
        return "<summary>\nThe task was to write hi into out.txt. Nothing is done.\n</summary>"
    if "Nothing is done." in prompt:
        return DONE if 'echo hi > out.txt"' in prompt else shell("echo hi > out.txt")
    return shell("seq 1 900")


async def test_parallel_sub_agents_are_paths_of_their_own(
    start_proxy: StartProxy, tmp_path: Path
) -> None:
    """Claude Code, whole, starts two sub-agents at once; each has its own prompt and tools."""
    proxy = await start_proxy(max_context_tokens=131_072)
    plays(proxy, hands_out)
    rollout = await trial(
        proxy, without(example("claude_code"), "--bare"), tmp_path, prompt=HAND_OUT
    )
    assert rollout.status is RolloutStatus.DONE, rollout.error
    assert rollout.reward == 1.0
    written = (Path(rollout.logs or "") / "work" / "parts.txt").read_text()
    assert Counter(written.split()) == {"ONE": 1, "TWO": 1}
    _, turns = await proxy.control.get_turns(rollout.trial_id)
    assert all(turn.status is TurnStatus.DONE for turn in turns)
    leaves = {turn.index for turn in turns} - {turn.parent for turn in turns}
    assert len(leaves) >= 3  # the main agent and two others
    assert rollout.forks["system_changed"] + rollout.forks["new_conversation"] >= 1, rollout.forks
    assert rollout.sampled_tokens == sum(len(c.answer_ids) for c in proxy.engine.calls)
    assert_trained_once(rollout, proxy)


@pytest.mark.parametrize("name", ["claude_code", "codex", "opencode"])
async def test_answer_that_is_cut_in_mid_stream_is_asked_again_and_trained_once(
    name: str, start_proxy: StartProxy, tmp_path: Path
) -> None:
    proxy = await start_proxy(max_context_tokens=131_072, limits={"engine_patience_s": 0})
    plays(proxy, play)
    proxy.engine.faults.append(Fault("die", after_tokens=6))
    rollout = await trial(proxy, example(name), tmp_path)
    assert rollout.status is RolloutStatus.DONE, rollout.error
    assert rollout.reward == 1.0
    _, turns = await proxy.control.get_turns(rollout.trial_id)
    assert [turn.status for turn in turns].count(TurnStatus.CUT) == 1
    assert turns[0].status is TurnStatus.CUT
    assert len(turns[0].sampled_ids) == 6
    done = sum(len(turn.sampled_ids) for turn in turns if turn.status is TurnStatus.DONE)
    assert rollout.sampled_tokens == done
    assert_trained_once(rollout, proxy)


async def test_agent_that_gives_up_after_a_cut_answer_is_our_failure_and_never_trained(
    start_proxy: StartProxy, tmp_path: Path
) -> None:
    """qwen-code does not retry: the rollout is `failed` and has no reward of 0."""
    proxy = await start_proxy(max_context_tokens=131_072, limits={"engine_patience_s": 0})
    plays(proxy, play)
    proxy.engine.faults.append(Fault("die", after_tokens=6))
    rollout = await trial(proxy, example("qwen_code"), tmp_path)
    assert rollout.status is RolloutStatus.FAILED
    assert not rollout.trainable
    assert rollout.sampled_tokens == 0


async def test_history_that_no_longer_fits_is_compacted_by_the_agent(
    start_proxy: StartProxy, tmp_path: Path
) -> None:
    """Claude Code gets its provider's error for an over-long prompt, and summarises."""

    proxy = await start_proxy(max_context_tokens=16_000)
    plays(proxy, summarises)
    rollout = await trial(proxy, example("claude_code"), tmp_path)
    assert rollout.status is RolloutStatus.DONE, rollout.error
    assert rollout.reward == 1.0
    assert rollout.forks["compaction"] == 1, rollout.forks
    _, turns = await proxy.control.get_turns(rollout.trial_id)
    ((after, summary),) = summaries(turns).items()
    assert b"Nothing is done." in turns[summary].answer
    assert summary < after
    masked = assign_credit(
        turns, 1.0, (), CreditConfig(function={"target": "benchmarks.compaction.masked:masked"})
    )
    assert summary in masked.untrained
    assert masked.returns == {t: 1.0 for t in rollout.turn_returns if t != summary}
    assert_trained_once(rollout, proxy)
