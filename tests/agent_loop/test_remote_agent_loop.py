"""One trial end to end: a real program, the real proxy, a scripted engine, a verifier."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agent_loop.launchers.command import CommandConfig, CommandLauncher
from agent_loop.processes.host import ProcessConfig
from agent_loop.records import Rollout, RolloutStatus, Task
from agent_loop.remote_agent_loop import RemoteAgentLoop
from agent_loop.rewards.protocol import RewardSource
from agent_loop.rewards.reported import LauncherReward, PostedReward
from agent_loop.rewards.verifier import Verifier, VerifierConfig
from agent_loop.trial.config import RecordingConfig, SamplingConfig, TrialConfig
from agent_loop.trial.credit import CreditConfig
from proxy.client import ProxyClient, ProxyClientError, SessionHandle
from proxy.records import Reward, SessionKind
from proxy.sampling import seed_of_call
from proxy.testing.scripted_engine import Fault
from tests.agent_loop.launchers.test_command import alive, until
from tests.proxy.conftest import ADMIN_KEY, RunningProxy, StartProxy

AGENT = (sys.executable, "-I", "-S", str(Path(__file__).parent / "small_agent.py"))
GOOD = "import sys; sys.exit(open('answer').read() != 'Hello.')"


@pytest.fixture
def trials(tmp_path: Path) -> Path:
    return tmp_path / "trials"


async def run(
    proxy: RunningProxy,
    trials: Path,
    *,
    verifier: str | None = GOOD,
    kind: SessionKind = SessionKind.TRAIN,
    client: ProxyClient | None = None,
    posted: bool = False,
    task: dict[str, Any] | None = None,
    sampling: SamplingConfig | None = None,
    recording: RecordingConfig | None = None,
    **config: Any,
) -> Rollout:
    rewards: RewardSource = LauncherReward()
    if verifier is not None:
        rewards = Verifier(VerifierConfig(argv=(sys.executable, "-I", "-S", "-c", verifier)))
    if posted:
        rewards = PostedReward()
    loop = RemoteAgentLoop(
        client or proxy.control,
        CommandLauncher(CommandConfig(argv=AGENT), ProcessConfig(grace_s=0.2)),
        rewards,
        trials,
        trial=TrialConfig(**{"max_retries": 0, "timeout_s": 120, **config}),
        sampling=sampling,
        recording=recording,
    )
    data = {"prompt": "Say hello.", **(task or {})}
    try:
        return await loop.run(Task("greet/1", data, "greetings"), kind=kind, seed=11, version=3)
    finally:
        if client is None:
            await loop.close()
        else:  # other loops may use it
            await loop.launcher.close()
            await loop.rewards.close()


async def test_trial_of_three_turns_is_one_trained_path_with_its_reward(
    proxy: RunningProxy, trials: Path
) -> None:
    proxy.engine.expect_extension = True
    rollout = await run(proxy, trials, task={"turns": 3})
    assert (rollout.status, rollout.reward, rollout.error) == (RolloutStatus.DONE, 1.0, None)
    assert rollout.num_turns == 3
    assert rollout.trainable
    (segment,) = rollout.segments
    sampled = [i for call in proxy.engine.calls for i in call.answer_ids]
    assert segment.ids[segment.mask].tolist() == sampled
    last = proxy.engine.calls[-1]
    assert segment.ids.tolist() == last.path
    assert rollout.sampled_tokens == rollout.metrics["sampled_tokens"] == len(sampled)
    assert rollout.started_version == 3
    assert rollout.times_s.keys() == {"opening", "agent", "generate", "verifier", "total"}


async def test_session_is_completed_and_logs_are_kept_without_the_workspace(
    proxy: RunningProxy, trials: Path
) -> None:
    rollout = await run(proxy, trials)
    shown = await proxy.control.show(rollout.trial_id)
    assert shown["status"] == "completed"
    logs = Path(rollout.logs or "")
    assert logs.parent == trials
    assert (logs / "agent.log").read_text() == "Hello.\n"
    assert not (logs / "work").exists()


async def test_session_has_the_reward_that_its_trial_got(proxy: RunningProxy, trials: Path) -> None:
    rollout = await run(proxy, trials)
    session, _ = await proxy.control.get_turns(rollout.trial_id)
    assert session.rewards == [Reward("trial", 1.0)]
    # What was reported is a part of it.
    await proxy.control.add_reward(rollout.trial_id, Reward("style", 0.5))
    session, _ = await proxy.control.get_turns(rollout.trial_id)
    assert session.reward == rollout.reward == 1.0


async def test_trial_counts_though_its_session_cannot_be_given_its_reward(
    proxy: RunningProxy, trials: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuses(*_: object) -> bool:
        raise ProxyClientError("the disk is full", 503)

    monkeypatch.setattr(ProxyClient, "add_reward", refuses)
    rollout = await run(proxy, trials, recording=RecordingConfig(patience_s=0))
    assert (rollout.status, rollout.reward) == (RolloutStatus.DONE, 1.0)


async def test_call_after_completion_is_refused_and_changes_nothing(
    proxy: RunningProxy, trials: Path
) -> None:
    rollout = await run(proxy, trials, keep_workspaces=True)
    key = (Path(rollout.logs or "") / "work" / "key").read_text()
    url = f"{proxy.url}/{rollout.trial_id}/v1/chat/completions"
    body = {"model": "m", "messages": [{"role": "user", "content": "late"}]}
    headers = {"Authorization": f"Bearer {key}"}
    async with proxy.http.post(url, json=body, headers=headers) as response:
        assert response.status == 409
    _, turns = await proxy.control.get_turns(rollout.trial_id)
    assert len(turns) == 1


async def test_sampling_is_pinned_in_training_and_left_to_the_agent_in_evaluation(
    proxy: RunningProxy, trials: Path
) -> None:
    task = {"sampling": {"temperature": 0.3}}
    pinned = SamplingConfig(temperature=0.7)
    seeded = SamplingConfig(temperature=0.7, seeded=True, routed_experts=True, alternatives=3)
    await run(proxy, trials, task=task, sampling=seeded)
    assert proxy.engine.calls[-1].sampling["temperature"] == 0.7
    prompt = np.array(proxy.engine.calls[-1].prompt_ids)
    assert proxy.engine.calls[-1].sampling["seed"] == seed_of_call(11, prompt, 0, 0)
    assert "routed_experts_prompt_start" in proxy.engine.calls[-1].sampling
    assert proxy.engine.calls[-1].sampling["logprobs"] == 4  # the sampled one, too
    rollout = await run(proxy, trials, task=task, sampling=pinned, kind=SessionKind.EVAL)
    assert proxy.engine.calls[-1].sampling["temperature"] == 0.3
    assert "routed_experts_prompt_start" not in proxy.engine.calls[-1].sampling
    assert proxy.engine.calls[-1].sampling["logprobs"] == 0
    assert rollout.reward == 1.0
    assert not rollout.trainable
    assert rollout.metrics["sampled_tokens"] > 0


async def test_every_temperature_of_the_configuration_can_be_pinned(
    proxy: RunningProxy, trials: Path
) -> None:
    """vLLM refuses more than 2 in each call, so that every trial would fail."""
    rollout = await run(proxy, trials, sampling=SamplingConfig(temperature=2))
    assert (rollout.reward, rollout.error) == (1.0, None)
    assert proxy.engine.calls[-1].sampling["temperature"] == 2
    with pytest.raises(ValueError, match="less than or equal to 2"):
        SamplingConfig(temperature=2.5)


@pytest.mark.parametrize("turns", [0, 1])
async def test_crashed_agent_keeps_a_verifiers_reward_only_if_it_was_answered(
    proxy: RunningProxy, trials: Path, turns: int
) -> None:
    verifier = "import sys; sys.exit(1)"
    rollout = await run(proxy, trials, verifier=verifier, task={"turns": turns, "exit_code": 3})
    if turns:
        assert (rollout.status, rollout.reward) == (RolloutStatus.TRUNCATED, 0.0)
        assert rollout.error == "the agent crashed: exit code 3"
    else:
        assert rollout.status is RolloutStatus.FAILED
        assert "never had an answer from the model (exit code 3)" in (rollout.error or "")


async def test_crash_without_a_reward_is_a_failed_trial_instead_of_reward_0(
    proxy: RunningProxy, trials: Path
) -> None:
    rollout = await run(proxy, trials, verifier=None, task={"exit_code": 3})
    assert (rollout.status, rollout.reward) == (RolloutStatus.FAILED, None)


async def test_crash_after_the_proxy_cut_a_call_is_a_failed_trial(
    start_proxy: StartProxy, trials: Path
) -> None:
    proxy = await start_proxy(limits={"engine_patience_s": 0})

    def then_dies(prompt: str) -> str:
        proxy.engine.faults.extend([Fault("die", after_tokens=1)] * 20)
        return "Hello."

    proxy.answers(then_dies)
    rollout = await run(proxy, trials, verifier="pass", task={"turns": 2})
    assert rollout.num_turns == 1
    assert rollout.metrics["cut_turns"] > 0
    assert rollout.status is RolloutStatus.FAILED
    assert "the agent crashed: exit code 1" in (rollout.error or "")


async def test_agent_that_timed_out_keeps_its_verified_reward(
    proxy: RunningProxy, trials: Path
) -> None:
    rollout = await run(proxy, trials, task={"hang": True}, timeout_s=3.0)
    assert (rollout.status, rollout.reward) == (RolloutStatus.TRUNCATED, 1.0)
    assert rollout.trainable
    assert "timed out" in (rollout.error or "")


async def test_trial_without_a_reward_source_has_no_reward_instead_of_0(
    proxy: RunningProxy, trials: Path
) -> None:
    rollout = await run(proxy, trials, verifier=None)
    assert (rollout.status, rollout.reward) == (RolloutStatus.DONE, None)
    assert not rollout.trainable


async def test_answer_that_reaches_its_length_limit_truncates_the_rollout(
    proxy: RunningProxy, trials: Path
) -> None:
    rollout = await run(proxy, trials, verifier="pass", task={"sampling": {"max_tokens": 1}})
    assert rollout.status is RolloutStatus.TRUNCATED
    assert rollout.truncated_turns == (0,)
    assert rollout.sampled_tokens == 1


NAN = "import os; open(os.environ['REWARD_DIR'] + '/reward.txt', 'w').write('nan')"


async def test_nan_reward_is_a_failed_trial_with_this_reason(
    proxy: RunningProxy, trials: Path
) -> None:
    rollout = await run(proxy, trials, verifier=NAN)
    assert (rollout.status, rollout.reward) == (RolloutStatus.FAILED, None)
    assert "nan is not a finite number" in (rollout.error or "")


async def test_retry_has_its_own_id_key_directory_and_recording(
    proxy: RunningProxy, trials: Path
) -> None:
    """The first trial's verifier is killed; the retry uses another id, key, directory and
    recording."""
    marker = trials.parent / "was-here"
    verifier = f"import os, pathlib; p = pathlib.Path({str(marker)!r})\n" + (
        "if not p.exists(): p.touch(); os.kill(os.getpid(), 9)"
    )
    # Without a wall, because the verifier leaves its mark outside of the trial.
    rollout = await run(
        proxy, trials, verifier=verifier, max_retries=2, keep_workspaces=True, sandbox="off"
    )
    assert rollout.status is RolloutStatus.DONE
    assert rollout.metrics["failed_attempts"] == 1
    directories = sorted(trials.iterdir())
    assert len(directories) == 2
    assert len({(d / "work" / "key").read_text() for d in directories}) == 2
    for directory in directories:
        _, turns = await proxy.control.get_turns(directory.name)
        assert len(turns) == 1


async def test_cancelling_ends_the_agent_and_completes_the_session(
    proxy: RunningProxy, trials: Path
) -> None:
    running = asyncio.ensure_future(
        run(proxy, trials, task={"hang": True}, timeout_s=600, keep_workspaces=True)
    )
    await until(lambda: bool(list(trials.glob("*/work/hanging"))))
    (pid_file,) = trials.glob("*/work/hanging")
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert not alive(pid_file)
    shown = await proxy.control.show(pid_file.parents[1].name)
    assert shown["status"] == "completed"


async def test_error_after_the_session_was_made_completes_it(
    proxy: RunningProxy, trials: Path
) -> None:
    def refused() -> frozenset[int]:
        raise OSError(errno.EMFILE, "Too many open files")

    loop = RemoteAgentLoop(
        proxy.control,
        CommandLauncher(CommandConfig(argv=AGENT)),
        LauncherReward(),
        trials,
        trial=TrialConfig(max_retries=0),
        private_ports=refused,
    )
    assert loop.wall is not None
    rollout = await loop.run(Task("greet", {"prompt": "Say hello."}), kind=SessionKind.TRAIN)
    await loop.close()
    assert "Too many open files" in str(rollout.error)
    assert (await proxy.control.show(rollout.trial_id))["status"] == "completed"


class AwayForAWhile(ProxyClient):
    """The real client, whose first calls at a trial's start and end do not reach the proxy, or are
    answered by a load balancer in front of it."""

    def away(self, times: int, status: int = 0) -> ProxyClient:
        self.times = {"create": times, "complete": times}
        self.status = status
        return self

    async def create_session(self, *arguments: Any, **more: Any) -> SessionHandle:
        self._nobody("create")
        return await super().create_session(*arguments, **more)

    async def complete(self, trial_id: str) -> None:
        self._nobody("complete")
        await super().complete(trial_id)

    def _nobody(self, call: str) -> None:
        if self.times[call] > 0:
            self.times[call] -= 1
            raise ProxyClientError("nobody is there", self.status)


@pytest.mark.parametrize(
    ("patience_s", "status"), [(20.0, RolloutStatus.DONE), (0.0, RolloutStatus.FAILED)]
)
async def test_trial_waits_up_to_patience_s_for_a_proxy_that_restarts(
    proxy: RunningProxy, trials: Path, patience_s: float, status: RolloutStatus
) -> None:
    async with AwayForAWhile(proxy.url, ADMIN_KEY) as client:
        recording = RecordingConfig(patience_s=patience_s)
        rollout = await run(proxy, trials, client=client.away(2), recording=recording)
    assert rollout.status is status


async def test_trial_that_is_cancelled_before_its_session_is_completed_completes_it(
    proxy: RunningProxy, trials: Path
) -> None:
    class AwayAtTheEnd(AwayForAWhile):
        was_asked = asyncio.Event()

        async def complete(self, trial_id: str) -> None:
            self.was_asked.set()
            await super().complete(trial_id)

    async with AwayAtTheEnd(proxy.url, ADMIN_KEY) as client:
        client.away(1)
        client.times["create"] = 0
        running = asyncio.ensure_future(run(proxy, trials, client=client))
        await client.was_asked.wait()
        running.cancel()
        await asyncio.wait([running])
        assert running.cancelled()
    (directory,) = trials.iterdir()
    assert (await proxy.control.show(directory.name))["status"] == "completed"


@pytest.mark.parametrize(
    ("answer", "status"),
    [(502, RolloutStatus.DONE), (504, RolloutStatus.DONE), (500, RolloutStatus.FAILED)],
)
async def test_trial_waits_for_a_proxy_whose_load_balancer_finds_nobody(
    proxy: RunningProxy, trials: Path, answer: int, status: RolloutStatus
) -> None:
    async with AwayForAWhile(proxy.url, ADMIN_KEY) as client:
        recording = RecordingConfig(patience_s=20.0)
        rollout = await run(proxy, trials, client=client.away(2, answer), recording=recording)
    assert rollout.status is status


async def test_trial_fails_with_the_reason_if_the_proxy_refuses_its_session(
    proxy: RunningProxy, trials: Path
) -> None:
    async with ProxyClient(proxy.url, "not the key") as client:
        rollout = await run(proxy, trials, client=client)
    assert rollout.status is RolloutStatus.FAILED
    assert "401" in (rollout.error or "")


async def test_rewards_posted_after_the_agents_end_are_awaited_and_credited_to_turns(
    proxy: RunningProxy, trials: Path
) -> None:
    running = asyncio.ensure_future(
        run(proxy, trials, posted=True, await_reward_s=20, task={"turns": 2})
    )
    await until(lambda: bool(list(trials.glob("*/work/answer"))))
    (answer,) = trials.glob("*/work/answer")
    trial_id = answer.parents[1].name
    await proxy.control.add_reward(trial_id, Reward("step", 0.25, turn=0))
    await proxy.control.add_reward(trial_id, Reward("judged", 0.5, {"style": 0.1}))
    rollout = await running
    assert rollout.reward == 0.5
    assert rollout.reward_parts == {"judged": 0.5, "judged.style": 0.1}
    assert rollout.turn_returns == {0: 0.75, 1: 0.5}


async def test_session_lives_as_long_as_the_agent_and_the_wait_for_its_reward_together(
    proxy: RunningProxy, trials: Path
) -> None:
    """The agent may take `timeout_s` and its launcher's overhead before the wait begins."""
    lives_s: list[float] = []

    class Watched(ProxyClient):
        async def create_session(self, *arguments: Any, **more: Any) -> SessionHandle:
            lives_s.append(more["ttl_s"])
            return await super().create_session(*arguments, **more)

        async def wait_reward(self, trial_id: str, *, timeout_s: float) -> bool:
            return False

    async with Watched(proxy.url, ADMIN_KEY) as client:
        await run(proxy, trials, posted=True, await_reward_s=3600, client=client, timeout_s=120)
    assert lives_s == [120 + CommandLauncher.overhead_s + 3600]


async def test_trial_without_the_awaited_reward_has_no_reward_instead_of_0(
    proxy: RunningProxy, trials: Path
) -> None:
    rollout = await run(proxy, trials, posted=True, await_reward_s=0.2)
    assert (rollout.status, rollout.reward) == (RolloutStatus.DONE, None)
    assert not rollout.trainable


async def test_misbehaving_agents_leak_no_processes_descriptors_sessions_or_directories(
    proxy: RunningProxy, trials: Path
) -> None:
    """Concurrent trials with agents that hang, crash, make no call, have a broken verifier, or are
    cancelled."""
    mark = str(trials)  # in the command line of every process of these trials
    rewards = Verifier(VerifierConfig(argv=(sys.executable, "-I", "-S", "-c", NAN, mark)))
    launcher = CommandLauncher(CommandConfig(argv=(*AGENT, mark)), ProcessConfig(grace_s=0.1))
    config = TrialConfig(timeout_s=3.0, max_retries=0)
    loop = RemoteAgentLoop(proxy.control, launcher, rewards, trials, trial=config)

    async def bad(**task: Any) -> Rollout:
        data = {"prompt": "Say hello.", **task}
        return await loop.run(Task("bad", data), kind=SessionKind.TRAIN)

    try:
        await bad()  # opens the servers and connections that stay open
        before = pipes()
        cancelled = asyncio.ensure_future(bad(hang=True))
        await until(lambda: bool(running(mark)))
        rollouts = await asyncio.gather(
            bad(hang=True), bad(turns=0), bad(exit_code=3), bad(), bad(turns=2, hang=True)
        )
        cancelled.cancel()
        await asyncio.wait([cancelled])
        assert {rollout.status for rollout in rollouts} == {RolloutStatus.FAILED}
        assert pipes() == before
        assert not list(trials.glob("*/work"))
        sessions = await proxy.control.list_sessions()
        assert {session["status"] for session in sessions} == {"completed"}
        assert running(mark) == []
    finally:
        await loop.close()


def pipes() -> int:
    """Number of open descriptors that are pipes or files in memory. Sockets are not counted,
    because connections are kept alive."""
    links = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            links.append(os.readlink(f"/proc/self/fd/{fd}"))
    return sum(link.startswith(("pipe:", "/memfd:")) for link in links)


def running(mark: str) -> list[str]:
    """The command lines that contain `mark`, which only processes of one test have."""
    lines = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if mark in line:
                lines.append(line)
    return lines


async def test_more_trials_can_wait_for_a_reward_than_the_client_has_connections(
    proxy: RunningProxy, trials: Path
) -> None:
    async with ProxyClient(proxy.url, ADMIN_KEY, max_connections=1) as client:
        rollouts = await asyncio.gather(
            *(run(proxy, trials, client=client, posted=True, await_reward_s=0.5) for _ in range(4))
        )
    assert [rollout.status for rollout in rollouts] == [RolloutStatus.DONE] * 4


async def test_trial_is_recorded_by_the_profile_under_the_model_name_that_agents_are_given(
    proxy: RunningProxy, trials: Path
) -> None:
    credit = CreditConfig(policy="main_path")
    rollout = await run(
        proxy,
        trials,
        task={"turns": 2},
        recording=RecordingConfig(profile="follow"),
        model_name="my-model",
        credit=credit,
        verifier="pass",
        keep_workspaces=True,
    )
    session, _ = await proxy.control.get_turns(rollout.trial_id)
    assert session.profile == "follow"
    assert (trials / rollout.trial_id / "work" / "model").read_text() == "my-model"


async def test_first_retry_waits_for_the_base_delay_and_the_next_twice_as_long(
    proxy: RunningProxy, trials: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    delays: list[float] = []
    sleep = asyncio.sleep

    async def measured(delay: float) -> None:
        delays.append(delay)
        await sleep(0)

    monkeypatch.setattr("agent_loop.remote_agent_loop.asyncio.sleep", measured)
    broken = "import os; os.kill(os.getpid(), 9)"
    await run(proxy, trials, verifier=broken, max_retries=2, retry_base_delay=3.0)
    assert [delay for delay in delays if delay >= 3] == [3.0, 6.0]


async def test_agent_is_not_given_hidden_fields_nor_hidden_files(
    proxy: RunningProxy, trials: Path, tmp_path: Path
) -> None:
    secret = tmp_path / "data" / "secret"
    secret.parent.mkdir()
    secret.write_text("42")
    code = (
        "import json, os, pathlib\n"
        "task = json.load(open(os.environ['TASK_FILE']))\n"
        f"seen = pathlib.Path({str(secret)!r}).read_text()\n"
        "pathlib.Path('seen').write_text(json.dumps([sorted(task), seen]))\n"
    )
    loop = RemoteAgentLoop(
        proxy.control,
        CommandLauncher(CommandConfig(argv=(sys.executable, "-I", "-S", "-c", code))),
        LauncherReward(),
        trials,
        trial=TrialConfig(
            hidden_fields=("hint",),
            show=(secret.parent,),
            hide=(secret,),
            max_retries=0,
            keep_workspaces=True,
        ),
    )
    task = Task("a", {"prompt": "Say hello.", "hint": "hello"}, "s")
    rollout = await loop.run(task, kind=SessionKind.TRAIN)
    await loop.close()
    seen = json.loads((trials / rollout.trial_id / "work" / "seen").read_text())
    assert seen == [["prompt"], ""]
