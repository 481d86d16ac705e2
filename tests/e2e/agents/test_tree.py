"""A real agent, unmodified, whose trial is branched into a tree of rollouts: from the recording to
the advantage of each turn."""

from __future__ import annotations

import asyncio
from pathlib import Path

from agent_loop.records import Rollout, Task
from examples.branching.producers import TreeGroup
from proxy.records import Origin, SessionKind
from proxy.testing.scripted_engine import text_script
from tests.e2e.agents.model import COMMANDS, play
from tests.e2e.agents.test_agents import example, pytestmark, trial
from tests.proxy.conftest import RunningProxy, StartProxy
from trainer.algorithms import Algorithm, AlgorithmConfig
from trainer.batch import trained_batch

__all__ = ["pytestmark"]

SPOILT = (COMMANDS[0], "echo bad > out.txt", *COMMANDS[2:])


class CodexTrials:
    """Runs Codex on the task of `test_agents`."""

    def __init__(self, proxy: RunningProxy, folder: Path) -> None:
        self.proxy = proxy
        self.folder = folder

    async def run(
        self,
        task: Task,
        *,
        kind: SessionKind,
        seed: int = 0,
        version: int = 0,
        origin: Origin | None = None,
    ) -> Rollout:
        return await trial(self.proxy, example("codex"), self.folder, kind=kind, origin=origin)


async def test_tree_of_codex_trials_gives_advantages_per_turn(
    start_proxy: StartProxy, tmp_path: Path
) -> None:
    """The branch spoils the file that the trunk has written before they part."""
    proxy = await start_proxy(max_context_tokens=131_072)
    trunk_calls = len(COMMANDS) + 1

    def answer(prompt: str) -> str:
        in_branch = len(proxy.engine.calls) > trunk_calls
        return play(prompt, commands=SPOILT if in_branch else COMMANDS)

    tokenizer = proxy.rendering.tokenizer
    proxy.engine.script = text_script(
        answer,
        decode=tokenizer.decode,
        encode=tokenizer.encode,
        end_ids=[tokenizer.convert_tokens_to_ids("<|im_end|>")],
    )
    group = await TreeGroup(
        CodexTrials(proxy, tmp_path / "trials"), Task("hi", {}), number=0, size=1, seed=0,
        version=lambda: 0, slots=asyncio.Semaphore(1),
        points=lambda trunk: [1], children=1,
    ).run()  # fmt: skip

    trunk, branch = group.rollouts
    assert [r.error for r in group.rollouts] == [None, None]
    assert (trunk.reward, branch.reward) == (1.0, 0.0)
    assert branch.prefix == f"{trunk.trial_id}@1"
    batch = trained_batch([group])
    sampled = sum(len(call.answer_ids) for call in proxy.engine.calls)
    assert batch.num_tokens == sampled
    Algorithm(AlgorithmConfig.model_validate({"advantage": "tree"})).compute_advantages(batch)
    assert batch.advantages is not None
    by_turn = {
        (int(rollout), min(int(turn), 1)): advantage
        for rollout, turn, advantage in zip(
            batch.rollout, batch.turns, batch.advantages.tolist(), strict=True
        )
    }
    assert by_turn == {(0, 0): 0.0, (0, 1): 1.0, (1, 1): -1.0}
