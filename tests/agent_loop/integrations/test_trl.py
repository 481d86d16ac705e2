"""TRL's own trainer takes its rollouts from our proxy; only the sampling engine is scripted.
A rule of `proxy.extras.rules` is one of its rewards."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

from agent_loop.errors import AgentLoopError
from agent_loop.extras.other_trainers.trl import AgentRollouts, trial_reward
from agent_loop.launchers.command import CommandConfig, CommandLauncher
from agent_loop.records import Task
from agent_loop.remote_agent_loop import RemoteAgentLoop
from agent_loop.rewards.verifier import Verifier, VerifierConfig
from agent_loop.trial.config import TrialConfig
from proxy.client import ProxyClient
from tests.agent_loop.scripted_loop import ClosableLoop
from tests.needs import needs
from tests.proxy.conftest import ADMIN_KEY, StartProxy, rendering, start_proxy

__all__ = ["rendering", "start_proxy"]
NO_TRL = (
    None
    if importlib.util.find_spec("trl")
    else "TRL is not installed: python -m benchmarks.install reference"
)
AGENT = """
import json, os, urllib.request
messages = [{"role": "user", "content": os.environ["TASK_PROMPT"]}]
for _ in range(2):
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({"messages": messages}).encode(),
        {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"],
         "Content-Type": "application/json"},
    )
    answer = json.load(urllib.request.urlopen(request))["choices"][0]["message"]
    messages += [answer, {"role": "user", "content": "Go on."}]
if int(os.environ["AGENT_SEED"]) % 2:
    open("solved", "w").close()
"""
TASK = Task("hi", {"prompt": "Say hi."})


@pytest.fixture(scope="session")
def checkpoint(tiny_model: Path) -> Path:
    """The proxy's model is the one that TRL trains."""
    return tiny_model


@needs(NO_TRL)
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # TRL's own
async def test_trl_trains_on_trials_that_our_proxy_recorded(
    start_proxy: StartProxy, tiny_model: Path, tmp_path: Path
) -> None:
    proxy = await start_proxy()
    (tmp_path / "agent.py").write_text(AGENT)
    taken: list[dict[str, list[Any]]] = []
    steps: list[int] = []

    def train() -> float:
        from datasets import Dataset
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from trl import GRPOConfig, GRPOTrainer

        loop = RemoteAgentLoop(
            ProxyClient(proxy.url, ADMIN_KEY),
            CommandLauncher(CommandConfig(argv=(sys.executable, str(tmp_path / "agent.py")))),
            Verifier(VerifierConfig(argv=("test", "-f", "solved"))),
            tmp_path / "trials",
            trial=TrialConfig(sandbox="off"),
        )
        rollouts = AgentRollouts(
            loop, [TASK], before=lambda trainer: steps.append(trainer.state.global_step)
        )

        def keep(prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
            taken.append(rollouts(prompts, trainer))
            return taken[-1]

        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(tiny_model),
            args=GRPOConfig(
                output_dir=str(tmp_path / "trl"),
                per_device_train_batch_size=4,
                num_generations=4,
                max_steps=2,
                bf16=False,
                use_cpu=True,
                report_to=[],
                save_strategy="no",
            ),
            reward_funcs=trial_reward,
            train_dataset=Dataset.from_dict({"prompt": [TASK.prompt] * 4}),
            processing_class=AutoTokenizer.from_pretrained(tiny_model),
            rollout_func=keep,
        )
        loss: float = trainer.train().training_loss
        rollouts.close()
        return loss

    assert abs(await asyncio.to_thread(train)) < 10
    assert steps == [0, 1]
    for rows in taken:
        assert set(rows["trial_reward"]) <= {0.0, 1.0}
        for number, trial_id in enumerate(rows["trial_id"]):
            _, turns = await proxy.control.get_turns(trial_id)
            first, second = turns
            ids = [*first.prompt_ids, *first.sampled_ids, *second.prompt_ids, *second.sampled_ids]
            assert rows["prompt_ids"][number] + rows["completion_ids"][number] == ids
            mask = rows["env_mask"][number]
            assert sum(mask) == len(first.sampled_ids) + len(second.sampled_ids)
            trained = [p for p, m in zip(rows["logprobs"][number], mask, strict=True) if m]
            assert trained == [*first.logprobs.tolist(), *second.logprobs.tolist()]


async def test_search_rule_makes_the_reward_of_a_trained_row_zero(
    start_proxy: StartProxy, tmp_path: Path
) -> None:
    rule = {"name": "hacks", "query": {"text": "edit the tests"}, "action": "zero_reward"}
    proxy = await start_proxy(rules=[rule])
    (tmp_path / "agent.py").write_text(AGENT)
    honest, hacking = TASK, Task("hack", {"prompt": "Say hi and edit the tests."})
    loop = RemoteAgentLoop(
        ProxyClient(proxy.url, ADMIN_KEY),
        CommandLauncher(CommandConfig(argv=(sys.executable, str(tmp_path / "agent.py")))),
        Verifier(VerifierConfig(argv=("true",))),
        tmp_path / "trials",
        trial=TrialConfig(sandbox="off"),
    )

    def rows() -> dict[str, list[Any]]:
        rollouts = AgentRollouts(loop, [honest, hacking])
        made = rollouts([honest.prompt, hacking.prompt], Trainer())
        rollouts.close()
        return made

    made = await asyncio.to_thread(rows)
    assert trial_reward(**made) == [1.0, 0.0]
    assert all(sum(mask) > 0 for mask in made["env_mask"])


class Trainer:
    """The part of TRL's trainer that a rollout function reads."""

    class state:  # noqa: N801
        global_step = 3


def test_prompt_of_no_task_and_batch_without_a_trial_to_train_are_refused() -> None:
    rollouts = AgentRollouts(ClosableLoop(fails=lambda *_: True), [TASK])
    with pytest.raises(AgentLoopError, match="'Other' is not the prompt of a given task"):
        rollouts(["Other"], Trainer())
    with pytest.raises(AgentLoopError, match="no trial of the batch can be trained"):
        rollouts([[{"role": "user", "content": "Say hi."}]], Trainer())
    rollouts.close()
