"""Lost trials are continued: a real agent process, the real proxy, a scripted engine."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agent_loop.launchers.command import CommandConfig, CommandLauncher
from agent_loop.processes.host import ProcessConfig
from agent_loop.records import AgentEnd, AgentResult, Rollout, RolloutStatus, Task, Trial
from agent_loop.remote_agent_loop import RemoteAgentLoop
from agent_loop.rewards.protocol import RewardSource
from agent_loop.rewards.reported import LauncherReward
from agent_loop.rewards.verifier import Verifier, VerifierConfig
from agent_loop.trial.config import TrialConfig
from agent_loop.trial.salvage import SalvageConfig, crashed_again, last_good_turn
from proxy.client import ProxyClient, ProxyClientError
from proxy.records import Origin, Session, SessionKind, Turn, TurnStatus
from proxy.records.binary import RecordFormatError
from tests.agent_loop.recorded import turn
from tests.agent_loop.test_remote_agent_loop import AGENT, GOOD
from tests.proxy.conftest import ADMIN_KEY, RunningProxy

CONTEXT, DONE = TurnStatus.CONTEXT, TurnStatus.DONE
TURNS = 4


class Lives(CommandLauncher):
    """Gives the agent of each trial what is other in its task: an agent sees nothing that the trial
    before it wrote."""

    def __init__(self, lives: Sequence[dict[str, Any]]) -> None:
        super().__init__(CommandConfig(argv=AGENT), ProcessConfig(grace_s=0.2))
        self.left = list(lives)

    async def run(self, trial: Trial) -> AgentResult:
        life = self.left.pop(0) if self.left else {}
        task = replace(trial.task, data={**trial.task.data, **life})
        return await super().run(replace(trial, task=task))


class Trials:
    """Runs rollouts of an agent that makes `TURNS` calls, and differs from trial to trial."""

    def __init__(self, proxy: RunningProxy, folder: Path) -> None:
        self.proxy = proxy
        self.folder = folder

    async def run(
        self,
        *lives: dict[str, Any],
        verifier: str | None = GOOD,
        origin: Origin | None = None,
        client: ProxyClient | None = None,
        **config: Any,
    ) -> Rollout:
        """`lives`: what the agent does in its first trials; later ones end well."""
        rewards: RewardSource = LauncherReward()
        if verifier is not None:
            rewards = Verifier(VerifierConfig(argv=(sys.executable, "-I", "-S", "-c", verifier)))
        loop = RemoteAgentLoop(
            client or self.proxy.control,
            Lives(lives),
            rewards,
            self.folder / "trials",
            trial=TrialConfig(**{"max_retries": 0, "salvage": SalvageConfig(), **config}),
        )
        data = {"prompt": "Count.", "turns": TURNS}
        try:
            return await loop.run(Task("t", data), kind=SessionKind.TRAIN, origin=origin)
        finally:
            await loop.close()

    @property
    def ids(self) -> list[str]:
        """The ids of all trials, oldest first."""
        folders = (self.folder / "trials").iterdir()
        return [f.name for f in sorted(folders, key=lambda f: (f / "task.json").stat().st_ctime_ns)]

    async def statuses(self, trial_id: str) -> list[TurnStatus]:
        _, turns = await self.proxy.control.get_turns(trial_id)
        return [each.status for each in turns]

    @property
    def answer_ids(self) -> list[int]:
        return [i for call in self.proxy.engine.calls for i in call.answer_ids]


@pytest.fixture
def trials(proxy: RunningProxy, tmp_path: Path) -> Trials:
    proxy.answers(lambda prompt: "Hello." + " again" * prompt.count("Go on."))
    return Trials(proxy, tmp_path)


GOOD_END = "import sys; sys.exit('again again again' not in open('answer').read())"


async def test_killed_trial_goes_on_from_its_last_answered_turn(trials: Trials) -> None:
    trials.proxy.engine.expect_extension = True
    rollout = await trials.run({"dies_after": 2}, verifier=GOOD_END)

    assert (rollout.status, rollout.reward, rollout.error) == (RolloutStatus.DONE, 1.0, None)
    assert len(trials.proxy.engine.calls) == TURNS
    (segment,) = rollout.segments
    assert segment.ids[segment.mask].tolist() == trials.answer_ids
    parent, branch = trials.ids
    assert branch == rollout.trial_id
    assert await trials.statuses(parent) == [CONTEXT] * 2
    assert await trials.statuses(branch) == [DONE] * TURNS
    expected = {"failed_attempts": 1, "continuations": 1, "diverged_continuations": 0}
    assert rollout.metrics.items() >= expected.items()
    assert rollout.metrics["lost_tokens"] == 0


async def test_continuation_that_is_killed_is_continued_itself(trials: Trials) -> None:
    """The second trial dies while it is replayed, the third one after a turn of its own."""
    lives = [{"dies_after": after} for after in (2, 1, 3)]
    rollout = await trials.run(*lives, verifier=GOOD_END)
    assert (rollout.status, rollout.reward) == (RolloutStatus.DONE, 1.0)
    assert len(trials.proxy.engine.calls) == TURNS
    assert rollout.sampled_tokens == len(trials.answer_ids)
    first, second, third, last = trials.ids
    assert [len(await trials.statuses(i)) for i in (first, second, third)] == [2, 2, 3]
    assert await trials.statuses(third) == [CONTEXT] * 3
    assert await trials.statuses(last) == [DONE] * TURNS
    assert rollout.metrics["continuations"] == 3


async def test_continuation_that_diverges_is_started_over_and_both_are_counted(
    trials: Trials,
) -> None:
    rollout = await trials.run({"dies_after": 3}, {"says": "Stop."}, max_retries=1)
    assert rollout.status is RolloutStatus.DONE
    assert len(trials.proxy.engine.calls) == 3 + TURNS
    assert rollout.sampled_tokens == sum(
        len(call.answer_ids) for call in trials.proxy.engine.calls[3:]
    )
    counted = {"failed_attempts": 2, "continuations": 1, "diverged_continuations": 1}
    assert rollout.metrics.items() >= counted.items()
    lost = sum(len(call.answer_ids) for call in trials.proxy.engine.calls[:3])
    assert rollout.metrics["lost_tokens"] == lost


async def test_divergence_without_a_retry_left_is_a_failed_trial_with_the_difference(
    trials: Trials,
) -> None:
    rollout = await trials.run({"dies_after": 3}, {"says": "Stop."})
    assert (rollout.status, rollout.reward) == (RolloutStatus.FAILED, None)
    assert rollout.error == (
        "BranchError: the branch diverged: at the recorded turn 1, message 2 differs: "
        "recorded 'Go on.', got 'Stop.'"
    )


async def test_continuation_that_ends_before_the_recording_does_not_train_it(
    trials: Trials,
) -> None:
    rollout = await trials.run({"dies_after": 3}, {"turns": 1})
    assert rollout.status is RolloutStatus.FAILED
    assert rollout.error == ("BranchError: the agent exited before 2 recorded turns were replayed")
    assert not rollout.segments


async def test_agent_that_crashes_at_the_same_point_again_is_judged(trials: Trials) -> None:
    """Its crash is its own: the continuation gets the same answers and crashes again."""
    crash = {"exit_code": 3}
    rollout = await trials.run(crash, crash, crash, verifier="import sys; sys.exit(1)")
    assert (rollout.status, rollout.reward) == (RolloutStatus.TRUNCATED, 0.0)
    assert len(trials.ids) == 2
    assert len(trials.proxy.engine.calls) == TURNS
    assert rollout.sampled_tokens == len(trials.answer_ids)


async def test_continuations_and_new_starts_are_bounded(trials: Trials) -> None:
    lives = [{"dies_after": after} for after in (1, 2, 3)] * 2
    salvage = SalvageConfig(max_continuations=2)
    rollout = await trials.run(*lives, verifier=None, salvage=salvage, max_retries=1)
    assert rollout.status is RolloutStatus.FAILED
    assert len(trials.ids) == len(lives)
    assert len(trials.proxy.engine.calls) == 2 * 3
    counted = {"failed_attempts": 5, "continuations": 4, "diverged_continuations": 0}
    assert rollout.metrics.items() >= counted.items()


async def test_agent_that_ran_out_of_time_is_continued(trials: Trials) -> None:
    rollout = await trials.run({"hangs_after": 2}, timeout_s=10.0)
    assert rollout.status is RolloutStatus.DONE
    assert len(trials.proxy.engine.calls) == TURNS
    assert rollout.metrics["continuations"] == 1


async def test_ends_that_are_not_listed_are_left_to_the_verifier(trials: Trials) -> None:
    salvage = SalvageConfig(after=("timed_out",))
    rollout = await trials.run({"dies_after": 2}, verifier="pass", salvage=salvage)
    assert (rollout.status, rollout.reward) == (RolloutStatus.TRUNCATED, 1.0)
    assert len(trials.ids) == 1


async def test_failed_verifier_costs_no_sampled_token(trials: Trials) -> None:
    verifier = "import os; os.path.exists('unjudgeable') and os.kill(os.getpid(), 9)"
    rollout = await trials.run({"leaves": "unjudgeable"}, verifier=verifier)
    assert len(trials.ids) == 2
    assert (rollout.status, rollout.reward) == (RolloutStatus.DONE, 1.0)
    assert len(trials.proxy.engine.calls) == TURNS
    assert rollout.sampled_tokens == len(trials.answer_ids)


@pytest.mark.parametrize("salvage", [None, SalvageConfig()])
async def test_trial_that_salvages_a_session_is_retried(
    trials: Trials, salvage: SalvageConfig | None
) -> None:
    """The session that the first trial salvages cannot be salvaged a second time."""
    lost = await trials.run({"dies_after": 2}, verifier=None, salvage=None)
    origin = Origin(lost.trial_id, 2, salvage=True)
    lives: tuple[dict[str, Any], ...] = ({"dies_after": 3}, {})
    rollout = await trials.run(*lives, verifier=None, origin=origin, salvage=salvage, max_retries=1)
    assert (rollout.status, rollout.error) == (RolloutStatus.DONE, None)
    calls = trials.proxy.engine.calls
    assert len(calls) == (TURNS if salvage else TURNS + 1)
    assert len(rollout.segments) == 1
    trained = [*calls[:2], *calls[-2:]]
    assert rollout.sampled_tokens == sum(len(call.answer_ids) for call in trained)
    assert await trials.statuses(lost.trial_id) == [CONTEXT] * 2


async def test_rollout_names_the_recorded_turns_that_it_does_not_train(trials: Trials) -> None:
    """They are its baseline's, also if the trial is lost and continued."""
    parent = await trials.run()
    branch = await trials.run({"dies_after": 3}, origin=Origin(parent.trial_id, 2))
    assert parent.prefix == ""
    assert branch.prefix == f"{parent.trial_id}@2"
    assert branch.metrics["continuations"] == 1
    assert await trials.statuses(branch.trial_id) == [CONTEXT] * 2 + [DONE] * 2


class UnreadableAtTimes(ProxyClient):
    """The real client, whose n-th reading of a session fails with `errors[n]`."""

    def failing(self, errors: Mapping[int, Exception]) -> UnreadableAtTimes:
        self.errors = errors
        self.reads = 0
        return self

    async def get_turns(self, trial_id: str) -> tuple[Session, list[Turn]]:
        self.reads += 1
        if self.reads in self.errors:
            raise self.errors[self.reads]
        return await super().get_turns(trial_id)


async def test_lost_trial_is_continued_although_the_proxy_restarts_at_that_moment(
    trials: Trials,
) -> None:
    """The first reading is the lost trial's own; the second one decides what follows."""
    async with UnreadableAtTimes(trials.proxy.url, ADMIN_KEY) as client:
        client.failing({2: ProxyClientError("nobody is there", 0)})
        rollout = await trials.run({"dies_after": 2}, client=client, verifier=GOOD_END)
    assert (rollout.status, rollout.metrics["continuations"]) == (RolloutStatus.DONE, 1)
    assert len(trials.proxy.engine.calls) == TURNS


@pytest.mark.parametrize(
    ("max_retries", "status", "started"),
    [(0, RolloutStatus.FAILED, 1), (1, RolloutStatus.DONE, 2)],
)
async def test_lost_trial_whose_record_has_another_format_is_started_over(
    trials: Trials, max_retries: int, status: RolloutStatus, started: int
) -> None:
    async with UnreadableAtTimes(trials.proxy.url, ADMIN_KEY) as client:
        client.failing({2: RecordFormatError("unknown record format 3, expected 4")})
        rollout = await trials.run({"dies_after": 2}, client=client, max_retries=max_retries)
    assert rollout.status is status
    assert len(trials.ids) == started


async def test_record_of_a_lost_trial_that_nothing_can_follow_is_not_read(trials: Trials) -> None:
    async with UnreadableAtTimes(trials.proxy.url, ADMIN_KEY) as client:
        client.failing({})
        rollout = await trials.run({"dies_after": 2}, client=client, verifier=None, salvage=None)
    assert rollout.status is RolloutStatus.FAILED
    assert client.reads == 1


def test_last_good_turn_is_the_last_answered_one_before_any_open_one() -> None:
    cut, still_open = TurnStatus.CUT, TurnStatus.OPEN

    def turns(*statuses: TurnStatus) -> list[Any]:
        return [turn(i, None, 0, [1], [2], status=status) for i, status in enumerate(statuses)]

    assert last_good_turn(turns()) == 0
    assert last_good_turn(turns(cut)) == 0
    assert last_good_turn(turns(DONE, cut, DONE, cut)) == 3
    assert last_good_turn(turns(CONTEXT, CONTEXT, cut)) == 2
    assert last_good_turn(turns(DONE, still_open, DONE)) == 1


def test_crash_counts_as_the_same_only_without_a_new_call() -> None:
    crashed = AgentResult(AgentEnd.CRASHED, error="signal 9")
    origin = Origin("p", 1, salvage=True)
    turns = [turn(i, None, 0, [1], [2]) for i in range(2)]
    assert crashed_again(origin, crashed, turns[:1])
    assert not crashed_again(origin, crashed, turns)
    assert not crashed_again(origin, AgentResult(AgentEnd.EXITED), turns[:1])
    assert not crashed_again(origin, None, turns[:1])
    assert not crashed_again(None, crashed, [])


async def test_branch_does_not_diverge_because_its_trial_has_another_folder(
    proxy: RunningProxy, tmp_path: Path
) -> None:
    proxy.answers("Hello.")
    config = CommandConfig(argv=AGENT, env={"TASK_PROMPT": "I work in {directory}/work."})
    origin = None
    for run in ("first", "second"):
        loop = RemoteAgentLoop(
            proxy.control,
            CommandLauncher(config),
            LauncherReward(),
            tmp_path / run / "trials",
            trial=TrialConfig(max_retries=0),
        )
        task = Task("t", {"prompt": "Count.", "turns": TURNS})
        rollout = await loop.run(task, kind=SessionKind.EVAL, origin=origin)
        await loop.close()
        assert (rollout.status, rollout.error) == (RolloutStatus.DONE, None)
        origin = Origin(rollout.trial_id, 2)
    assert len(proxy.engine.calls) == TURNS + TURNS - 2
